"""Requests of many adapters and none on a GPU, against transformers on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.adapted_requests import check, check_coming_and_going
from support.parity import FEW_PAGES

pytestmark = pytest.mark.gpu

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"max_prefill_length": 16, "page_size": 4},
        FEW_PAGES,
        {"speculative": "ngram"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3", "llama-biased", "moe"])
def test_each_request_gets_the_tokens_of_its_adapter(name: str, options: dict[str, Any]) -> None:
    """Batches over 16 run without graphs."""
    check(name, **ON_GPU | options)


@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 0}], ids=str)
def test_adapters_come_and_go_beside_requests(options: dict[str, Any]) -> None:
    check_coming_and_going("qwen3", **ON_GPU | options)
