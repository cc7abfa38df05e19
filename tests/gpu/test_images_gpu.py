"""Requests with images on a GPU, against transformers on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.image_cases import GEMMA_3, GEMMA_4, LLAVA, QWEN, QWEN_3_VL, check

from minisgl.models import lfm2

pytestmark = pytest.mark.gpu

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"max_prefill_length": 17, "page_size": 4},
        {"num_pages": 28, "page_size": 4, "schedule_conservativeness": 0.02},  # so few: retracted
        {"speculative": "ngram"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "architecture", [LLAVA, QWEN, QWEN_3_VL, GEMMA_3, GEMMA_4, lfm2.WITH_TOWER]
)
def test_tokens_equal_those_of_transformers(architecture: str, options: dict[str, Any]) -> None:
    """Batches over 4 run without graphs."""
    check(architecture, **ON_GPU | options)


@pytest.mark.parametrize("architecture", [LLAVA, QWEN])
def test_images_come_back_from_host_memory(architecture: str) -> None:
    options = {"num_pages": 28, "page_size": 4, "host_cache": 0.01}
    found, _ = check(architecture, alone=True, times=2, **ON_GPU | options)
    assert sum(request.num_cached_tokens for request in found)
