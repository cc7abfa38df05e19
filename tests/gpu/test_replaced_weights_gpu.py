"""Weights that are replaced in place on a GPU, where captured steps hold their addresses."""

from __future__ import annotations

from typing import Any

import pytest
from support.replaced_weights import check_replaced

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "fp8"},
        {"dtype": "bfloat16", "model_impl": "adopted"},
    ],
    ids=str,
)
def test_captured_steps_answer_with_the_weights_that_came(options: dict[str, Any]) -> None:
    check_replaced(device="cuda", cuda_graph_max_bs=4, **options)
