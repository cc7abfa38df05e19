"""Every pair that the table in the README of the command line does not refuse gives the tokens of
transformers: the options of a row, with a small model that caches what the column says."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest
from pairs import ADOPTED, HEAD, KINDS, OPTIONS, SMALL, SMALL_WINDOWED, Outcome, cell
from support.cache_kinds import (
    FEW,
    FULL,
    LATENTS,
    LENGTHS,
    NUM_SHARED,
    NUM_TOKENS,
    STATE_CACHE,
    STATES,
    WINDOWED,
    WINDOWED_ALONE,
    case_of,
    path,
)
from support.draft_networks import Head, save_head
from support.folders import ROOT
from support.parity import Case, batch, complete, count_excused, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.kvcache.copies import LoadRule

# Pairs that have a test of their own elsewhere.
_IN, _ENGINE, _MODELS = "tests/integration/test_", "tests/engine/test_", "tests/models/test_"
ELSEWHERE = {
    ("`--host-cache`", FULL): f"{_IN}host_cached_requests.py::"
    "test_loaded_prefixes_give_the_reference_tokens",
    ("`--host-cache`", LATENTS): f"{_IN}host_cached_requests.py::test_latents_survive_host_memory",
    ("`--host-cache`, `--tp --host-cache`", WINDOWED): f"{_ENGINE}window_pages.py::"
    "test_windows_come_back_from_host_memory",
    ("`--host-cache`, `--tp --host-cache`", STATES): f"{_MODELS}qwen3_5.py::"
    "test_a_hit_in_host_memory_changes_no_token",
    ("`--tp --host-cache`, `--pp --host-cache`", FULL): f"{_IN}host_cached_requests.py::"
    "test_each_of_two_ranks_keeps_its_part",
    **{
        ("`--disk-cache`", kind): f"{_IN}restart.py::test_a_restarted_engine_finds_its_prefixes"
        for kind in (FULL, LATENTS)
    },
    ("`--disk-cache`", WINDOWED): f"{_ENGINE}window_pages.py::test_windows_survive_a_restart",
    ("`--disk-cache`", STATES): f"{_MODELS}qwen3_5.py::test_states_survive_a_restart",
    **{
        ("`--pp --roles`", kind): "tests/router/test_disaggregation.py::"
        "test_engines_hand_over_what_any_kind_of_model_keeps_and_may_be_killed"
        for kind in (FULL, WINDOWED)
    },
    ("`--dp-attention --roles`", FULL): "tests/router/test_disaggregation.py::"
    "test_engines_hand_over_what_any_kind_of_model_keeps_and_may_be_killed",
    ("`--tp --disk-cache`, `--pp --disk-cache`", FULL): f"{_IN}restart.py::"
    "test_each_of_two_ranks_finds_its_part",
    **{
        ("`--tp`, retraction", kind): f"{_IN}tensor_parallel.py::"
        "test_greedy_tokens_of_several_ranks_equal_those_of_transformers"
        for kind in (FULL, WINDOWED_ALONE)
    },
    ("`--pp`", FULL): f"{_IN}pipeline.py::"
    "test_greedy_tokens_of_uneven_stages_equal_those_of_transformers",
    ("`--dp-attention`", FULL): f"{_IN}dp_attention.py::"
    "test_greedy_tokens_of_a_dense_model_equal_those_of_transformers",
    ("`--tp`, `--pp`, `--dp-attention`", LATENTS): f"{_IN}layouts.py::"
    "test_tokens_of_attention_over_latents_equal_those_of_transformers",
    ("`--tp`, `--pp`, `--dp-attention`", WINDOWED): f"{_ENGINE}window_pages.py::"
    "test_ranks_and_stages_give_the_tokens_of_transformers",
    ("`--tp`, `--pp`, `--dp-attention`", STATES): f"{_MODELS}qwen3_5.py::"
    "test_ranks_divide_heads_or_requests_and_stages_layers",
    ("retraction", LATENTS): f"{_IN}host_cached_requests.py::test_latents_survive_host_memory",
    ("retraction", WINDOWED): f"{_ENGINE}window_pages.py::test_retraction_changes_no_token",
    ("retraction", STATES): f"{_MODELS}qwen3_5.py::test_tokens_depend_on_no_option",
    **{
        (ADOPTED, kind): f"{_MODELS}adopted.py::test_tokens_equal_those_of_transformers"
        for kind in (FULL, WINDOWED)
    },
    (ADOPTED, WINDOWED_ALONE): f"{_ENGINE}window_pages.py::"
    "test_adopted_models_give_the_tokens_of_transformers",
}
_THERE = {(name, kind) for names, kind in ELSEWHERE for name in names.split(", ")}


def is_part_of_another(name: str, kind: str) -> bool:
    """The engines of --roles are those that exchange pages, and those with a disk have host memory
    in front of it. Stages, and ranks that divide requests, exchange what they keep in host memory,
    where each kind has a test."""
    longer = name.replace("--host-cache", "--disk-cache")
    with_disk = longer != name and longer in OPTIONS and (longer, kind) not in _THERE
    return with_disk or name.endswith("--roles`")


def is_refused(name: str, kind: str) -> bool:
    return cell(name, kind).outcome is Outcome.REFUSED


ADOPTED_HERE = (ADOPTED, LATENTS)  # to ask about the others takes too long for a list of tests
HERE = [
    (name, kind)
    for name in OPTIONS
    for kind in KINDS
    if (name, kind) not in _THERE and not is_part_of_another(name, kind)
    if (name, kind) == ADOPTED_HERE or (name != ADOPTED and not is_refused(name, kind))
]


def drafter_of(name: str, kind: str) -> str:
    if name == HEAD:
        return str(save_head(Head(case_of(kind).spec, taps=(0, 1)), path(f"head of {kind}")))
    natives = {SMALL: FULL, SMALL_WINDOWED: WINDOWED_ALONE}
    return str(case_of(natives[name]).folder) if name in natives else name


def options_of(name: str, kind: str, folder: Path) -> dict[str, Any]:
    values = dict(OPTIONS[name].values)
    if "host_cache" in values:
        values["host_cache"] = 0.01
    if "disk_cache" in values:
        values["disk_cache"] = str(folder / "disk")
    if "speculative" in values:
        values["speculative"] = drafter_of(values["speculative"], kind)
    return {**FEW, **values, **(STATE_CACHE if kind == STATES else {})}


def started(case: Case, options: dict[str, Any], outcome: Outcome) -> AsyncEngine:
    loaded = load_engine(case.folder, **options)
    if any(spec.window is not None for spec in loaded.model.layers if hasattr(spec, "window")):
        assert (loaded.config.windows is not None) == (outcome is Outcome.WORKS)
    if loaded.model.states:
        assert loaded.capacity.num_snapshots > 0
    return AsyncEngine(loaded)


async def ask(engine: AsyncEngine, case: Case) -> None:
    await count_excused(engine, case, await batch(engine, case.prompts, [greedy(NUM_TOKENS)] * 3))


async def ask_twice(engine: AsyncEngine, case: Case, *, host: bool) -> None:
    """The second time on what is found, with `host` after other prompts have pushed it out."""
    await ask(engine, case)
    for token in (3, 5) if host else ():  # of ranks that divide requests, one for each
        await complete(engine, [token] * 90, greedy(2))
    await ask(engine, case)
    counters = engine.stats().counters
    assert counters.num_cached_tokens > NUM_SHARED and bool(counters.num_host_tokens) == host


async def hand_over(case: Case, options: dict[str, Any], outcome: Outcome, folder: Path) -> None:
    """One engine computes the prompts, and another one goes on."""
    options = {**options, "num_pages": 100}
    async with (
        started(case, options, outcome) as prefill,
        started(case, options, outcome) as decode,
    ):
        address = await prefill.pages.share(str(folder / "a"), always_load=False)
        await decode.pages.share(str(folder / "b"), always_load=True)
        for prompt in case.prompts:
            assert await prefill.pages.offer(prompt) and await decode.pages.fetch(address, prompt)
        await ask(decode, case)
        assert decode.stats().counters.num_cached_tokens >= sum(LENGTHS) - 4 * len(LENGTHS)


@pytest.mark.parametrize(("name", "kind"), HERE)
def test_a_pair_that_is_not_refused_gives_the_tokens_of_transformers(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    case, options = case_of(kind), options_of(name, kind, tmp_path)
    outcome = cell(name, kind).outcome

    async def run() -> None:
        if OPTIONS[name].shares:
            await hand_over(case, options, outcome, tmp_path)
            return
        async with started(case, options, outcome) as engine:
            await ask_twice(engine, case, host="host_cache" in options)
        if "disk_cache" in options:
            async with started(case, options, outcome) as again:
                await ask(again, case)
                assert again.stats().counters.num_disk_tokens > NUM_SHARED

    asyncio.run(run())


def test_every_other_pair_is_refused_or_has_a_test_elsewhere() -> None:
    pairs = [(name, kind) for name in OPTIONS for kind in KINDS]
    left = [pair for pair in pairs if pair not in HERE and not is_part_of_another(*pair)]
    assert {pair for pair in left if not is_refused(*pair)} <= _THERE
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for test in {*ELSEWHERE.values()}:
        file, _, name = test.partition("::")
        found = ast.parse((ROOT / file).read_text()).body
        assert name in [each.name for each in found if isinstance(each, functions)], test
