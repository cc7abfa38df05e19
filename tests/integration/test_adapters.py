"""Requests of many adapters and none, in the same steps: each gets the tokens of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.adapted_requests import answer, asked_of, check
from support.parity import FEW_PAGES, greedy, load_engine

from minisgl.engine import AsyncEngine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_length": 16, "page_size": 4},
        {"padded": 8},
        {"overlap": False, **FEW_PAGES},
        {"speculative": "ngram"},
        {"tp": 2},
        {"tp": 2, "dp_attention": True, "padded": 8},
        {"pp": 2},
    ],
    ids=str,
)
def test_each_request_gets_the_tokens_of_its_adapter(options: dict[str, Any]) -> None:
    """32 requests of eight adapters and none, for which there are three places."""
    check("qwen3", **options)


def test_experts_have_adapters_too() -> None:
    check("moe", tp=2, ep=True)


def test_a_prefix_is_found_again_by_what_the_adapter_computes_not_by_its_name() -> None:
    asked = asked_of("qwen3")
    folders = [each.split("=")[1] for each in asked.options["lora"][:2]]
    lora = (f"one={folders[0]}", f"same={folders[0]}", f"other={folders[1]}")
    prompt = asked.prompts[4]

    async def run() -> list[int]:
        loaded = load_engine(asked.case.folder, lora=lora, page_size=4)
        async with AsyncEngine(loaded) as engine:
            names = (None, "one", "same", "other", None)
            found = [await answer(engine, prompt, name, greedy(1)) for name in names]
            return [request.num_cached_tokens for request in found]

    cached = len(prompt) - len(prompt) % 4 - (4 if len(prompt) % 4 == 0 else 0)
    assert asyncio.run(run()) == [0, 0, cached, 0, cached]
