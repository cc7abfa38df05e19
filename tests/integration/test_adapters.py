"""Requests of many adapters and none, in the same steps: each gets the tokens of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.adapted_requests import answer, asked_of, check, folder_of
from support.draft_networks import Head, save_head
from support.parity import FEW_PAGES, case_of, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.kvcache.copies import LoadRule
from minisgl.tiers.tiers import Tiers


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
        {"model_impl": "adopted"},
    ],
    ids=str,
)
def test_each_request_gets_the_tokens_of_its_adapter(options: dict[str, Any]) -> None:
    """18 requests of eight adapters and none, for which there are three places."""
    check("qwen3", **options)


def test_experts_have_adapters_too() -> None:
    check("moe", tp=2, ep=True)


def test_a_network_drafts_without_adapters(tmp_path: Path) -> None:
    """The tokens are the same."""
    head = save_head(Head(case_of("qwen3").spec, taps=(0, 1)), tmp_path)
    found = check("qwen3", speculative=str(head))
    assert sum(request.num_drafted_tokens for request in found)


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


def test_a_prefix_on_disk_is_found_by_what_the_adapter_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an engine that has the adapter under another name."""
    monkeypatch.setattr(Tiers, "measure_disk", lambda self, host: LoadRule(0.0, 1.0))
    asked = asked_of("qwen3")
    prompt = asked.prompts[4]

    async def run(lora: dict[str, str], names: Sequence[str | None]) -> list[tuple[bool, bool]]:
        options = {"page_size": 4, "host_cache": 0.01, "disk_cache": str(tmp_path)}
        given = tuple(f"{name}={folder_of(asked, of)}" for name, of in lora.items())
        async with AsyncEngine(load_engine(asked.case.folder, lora=given, **options)) as engine:
            found = []
            for name in names:
                before = engine.stats().counters.num_disk_tokens
                request = await answer(engine, prompt, name, greedy(16))
                from_disk = engine.stats().counters.num_disk_tokens > before
                found.append((request.num_cached_tokens > 0, from_disk))
            return found

    assert asyncio.run(run({"one": "a0", "other": "a1"}, ["one"])) == [(False, False)]
    again = asyncio.run(run({"one": "a1", "same": "a0"}, [None, "one", "same"]))
    assert again == [(False, False), (False, False), (True, True)]
