"""Requests with images: their tokens are those of transformers, however the steps cut them."""

from __future__ import annotations

from typing import Any

import pytest
from support.image_cases import check

FAMILIES = ("LlavaForConditionalGeneration",)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"page_size": 1}, {"page_size": 16}, {"page_size": 4, "max_prefill_length": 7}],
    ids=str,
)
def test_tokens_equal_those_of_transformers(architecture: str, options: dict[str, Any]) -> None:
    check(architecture, **options)
