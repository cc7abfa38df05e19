"""Layers with a window that have pages of their own: the tokens of transformers, and the room."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from support import gemma_checkpoints
from support.adopted_cases import case_of as adopted_case_of
from support.adopted_cases import check as check_adopted
from support.checkpoints import GreedyRun, spec_named
from support.draft_networks import Head, save_head
from support.parity import (
    FEW_PAGES,
    SAMPLED,
    Case,
    batch,
    case_of,
    check,
    complete,
    count_excused,
    greedy,
    load_engine,
)
from support.tensor_parallel import EVERYTHING, check_with_aborts, shortened
from torch import Tensor

from minisgl.attention.base import (
    Attention,
    AttentionCall,
    AttentionShape,
    DecodeBatch,
    PrefillBatch,
)
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.engine.startup_lines import tell_of_windows
from minisgl.kvcache.copies import LoadRule
from minisgl.runner import load
from minisgl.runner.setup import read_setup

WINDOW = 20  # of the checkpoints
NUM_TOKENS = 6
# So few requests at once that windowed layers need fewer pages than the others.
ON: dict[str, Any] = {"max_running_requests": 3, "max_prefill_length": 7}
OFF: dict[str, Any] = {"max_running_requests": 200, "max_prefill_length": 7}


def native_case(family: str) -> Case:
    return case_of(family) if family == "gpt-oss" else gemma_checkpoints.prompts_of("dense")


def some_of(case: Case, part: slice) -> Case:
    return dataclasses.replace(case, prompts=case.prompts[part], runs=case.runs[part])


def has_own_pages(loaded: Loaded[Any]) -> bool:
    return 0 < loaded.capacity.num_window_pages < loaded.capacity.num_pages


@pytest.mark.parametrize(
    ("family", "page_size"), [("gpt-oss", 1), ("gpt-oss", 16), ("gemma4", 1), ("gemma4", 16)]
)
def test_chunks_and_cached_prefixes_give_the_tokens_of_transformers(
    family: str, page_size: int
) -> None:
    case = native_case(family)
    assert has_own_pages(load_engine(case.folder, page_size=page_size, **ON))
    case = some_of(case, slice(3, 5))
    _, cached = check(case, alone=True, page_size=page_size, **ON)
    assert max(cached) >= WINDOW // page_size * page_size > 0


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4"])
def test_retraction_changes_no_token(family: str) -> None:
    case, options = native_case(family), FEW_PAGES | ON
    assert has_own_pages(load_engine(case.folder, **options))
    stats, _ = check(case, **options)
    assert stats.counters.num_retractions > 0


# Of the last, all layers have a window.
@pytest.mark.parametrize(
    ("architecture", "page_size"),
    [
        ("Gemma3ForCausalLM", 16),
        ("Olmo3ForCausalLM", 1),
        ("MistralForCausalLM", 1),
    ],
)
def test_adopted_models_give_the_tokens_of_transformers(
    architecture: str, page_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = adopted_case_of(architecture, tmp_path_factory.getbasetemp())
    options = {"page_size": page_size, "model_impl": "adopted", **ON}
    assert has_own_pages(load_engine(case.folder, **options))
    cached = check_adopted(case, alone=True, **options)
    assert cached[1] == 24 // page_size * page_size


RANKS = [({"tp": 2}, 2), ({"pp": 2}, 2), ({"tp": 2, "dp_attention": True, "num_pages": 26}, 4)]


@pytest.mark.parametrize(("ranks", "num_requests"), RANKS, ids=str)
def test_ranks_and_stages_give_the_tokens_of_transformers(
    ranks: dict[str, Any], num_requests: int
) -> None:
    case, options = shortened(case_of("gpt-oss")), {**ranks, "max_running_requests": num_requests}
    config = EngineConfig(model=str(case.folder), device="cpu", **EVERYTHING | options)
    assert read_setup(config).config.windows is not None
    check_with_aborts(case, **options)


# So few pages that a long prompt pushes the others out.
CRAMPED: dict[str, Any] = {"num_pages": 40, "max_seq_len_override": 156, "page_size": 4, **ON}


async def ask_each(engine: AsyncEngine, case: Case) -> list[int]:
    """Ask the prompts of a case, one after the other; how many tokens of each were cached."""
    cached: list[int] = []
    for prompt in case.prompts:
        output = await complete(engine, prompt, greedy(NUM_TOKENS))
        await count_excused(engine, first_tokens(case, prompt, NUM_TOKENS), [output])
        cached.append(output.num_cached_tokens)
    engine.audit()
    return cached


def longer_than_window(case: Case) -> tuple[Case, list[int]]:
    """The prompts that are, and how many tokens of each can be found in pages of 4."""
    runs = {tuple(prompt): run for prompt, run in zip(case.prompts, case.runs, strict=True)}
    prompts = [prompt for prompt in case.prompts if len(prompt) > WINDOW]
    case = dataclasses.replace(
        case, prompts=prompts, runs=[runs[tuple(prompt)] for prompt in prompts]
    )
    return case, [(len(prompt) - 1) // 4 * 4 for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt-oss", {}),
        ("gpt-oss", {"padded": 3}),
        ("gpt-oss", {"tp": 2}),
        ("gpt-oss", {"pp": 3, "max_running_requests": 2}),
        ("gemma4", {}),
        ("gemma4", {"max_prefill_length": 28, "max_running_requests": 2}),
    ],
    ids=str,
)
def test_windows_come_back_from_host_memory(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    case, every = longer_than_window(native_case(family))
    loaded = load_engine(case.folder, host_cache=0.02, **CRAMPED | options)
    assert has_own_pages(loaded)

    async def run() -> None:
        async with AsyncEngine(loaded) as engine:
            assert await ask_each(engine, case) < every
            await complete(engine, [3] * 140, greedy(2))  # pushes them out
            assert await ask_each(engine, case) == every
            assert engine.stats().counters.num_host_tokens >= sum(every) // 2

    asyncio.run(run())


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4"])
def test_windows_survive_a_restart(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where files are lost that have some of them, the tokens are computed."""
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    case, every = longer_than_window(native_case(family))
    folder = tmp_path / "disk"
    options = {"host_cache": 0.02, "disk_cache": str(folder), **CRAMPED}

    async def run() -> tuple[list[int], int]:
        loaded = load_engine(case.folder, **options)
        assert has_own_pages(loaded)
        async with AsyncEngine(loaded) as engine:
            cached = await ask_each(engine, case)
            return cached, engine.stats().counters.num_disk_tokens

    first, num_disk_tokens = asyncio.run(run())
    assert first < every and num_disk_tokens == 0
    cached, num_disk_tokens = asyncio.run(run())
    assert cached == every and num_disk_tokens > WINDOW
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    files = sorted((path for path, size in sizes.items() if size > 500), key=sizes.__getitem__)
    assert len(files) > 1
    for path in files[::2]:
        path.unlink()
    cached, _ = asyncio.run(run())
    assert cached < every


def test_drafting_networks_change_no_token(tmp_path: Path) -> None:
    case = case_of("gpt-oss")
    head = save_head(Head(spec_named("gpt-oss"), taps=(0, 1, 2)), tmp_path / "head")
    options = {"page_size": 4, "speculative": str(head), "draft_tokens": 2, **ON}
    assert has_own_pages(load_engine(case.folder, **options))
    _, cached = check(some_of(case, slice(3, 5)), alone=True, **options)
    assert max(cached) == 16  # of 20: the last page depends on the token behind it


def test_sampled_tokens_are_those_of_one_page_table() -> None:
    """With logprobs, penalties and what else depends on a request's tokens."""
    case = case_of("gpt-oss")

    async def tokens(**options: Any) -> list[list[int]]:
        loaded = load_engine(case.folder, page_size=4, **options)
        assert has_own_pages(loaded) == (options == ON)
        async with AsyncEngine(loaded) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
        return [output.token_ids for output in outputs]

    assert asyncio.run(tokens(**ON)) == asyncio.run(tokens(**OFF))


class Planned(TorchAttention):
    """Takes only what it has planned, as FlashInfer does."""

    def plan_decode(self, batch: DecodeBatch) -> None:
        assert batch.lengths_host is not None
        self.rows = batch

    def plan_prefill(self, batch: PrefillBatch) -> None:
        self.chunks = batch

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        assert batch is self.rows
        return super().decode(call, batch)

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        assert batch is self.chunks
        return super().prefill(call, batch)


def test_a_backend_that_plans_on_the_host_plans_each_page_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[AttentionShape] = []

    def make(prefill: str, decode: str, shape: AttentionShape) -> Attention:
        shapes.append(shape)
        return Attention(Planned(), Planned())

    monkeypatch.setattr(load, "make_attention", make)
    case = case_of("gpt-oss")
    check(some_of(case, slice(2, 4)), **ON)
    whole, windowed = (shape.layers for shape in shapes)
    assert windowed == {spec for spec in whole if spec.window is not None} < whole


def test_padded_rows_as_in_captured_steps_change_no_token() -> None:
    case = case_of("gpt-oss")
    check(some_of(case, slice(2, 4)), **ON, padded=3)


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefixes_of_every_length_around_the_window_are_found_and_right(page_size: int) -> None:
    """Whatever part of a prompt another one shares, it goes on behind a page that is there."""
    case = case_of("gpt-oss")
    prompt = case.prompts[4]

    async def check_all() -> None:
        loaded = load_engine(case.folder, page_size=page_size, **ON)
        async with AsyncEngine(loaded) as engine:
            for length in (1, *range(WINDOW - 5, WINDOW + 6), 2 * WINDOW + 1):
                shared = [*prompt[:length], (prompt[length] + 1) % case.spec.vocab_size]
                await complete(engine, [*shared, 1, 2, 3], greedy(2))
                output = await complete(engine, prompt, greedy(6))
                await count_excused(engine, first_tokens(case, prompt, 6), [output])
                if length > 1:  # the first of these has left its own prompt
                    assert output.num_cached_tokens == (len(prompt) - 1) // page_size * page_size

    asyncio.run(check_all())


def first_tokens(case: Case, prompt: list[int], count: int) -> Case:
    """One prompt of a case, with the first tokens that follow it."""
    run = case.runs[case.prompts.index(prompt)]
    run = GreedyRun(run.token_ids[:count], run.logits[:count])
    return dataclasses.replace(case, prompts=[prompt], runs=[run])


def test_the_kv_cache_is_as_large_as_computed_and_a_sequence_fills_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = case_of("gpt-oss")
    loaded = load_engine(case.folder, page_size=4, num_pages=60, **ON)
    capacity, sizes = loaded.capacity, loaded.config.windows
    assert sizes is not None
    assert sizes.span == 1 + 16 // 4 + -(-(WINDOW - 1) // 4) and sizes.spare == 2
    assert capacity.num_window_pages == 1 + 2 + 3 * sizes.span == 33
    full, windowed = sizes.page_bytes(loaded.model.layer_specs("float32"))
    [each] = {spec.bytes_per_token for spec in loaded.model.kv_specs("float32")}
    num_windows = sum(spec.window is not None for spec in loaded.model.attention)
    assert (full, windowed) == (4 * each * (3 - num_windows), 4 * each * num_windows)
    assert loaded.runner.state_bytes == 60 * full + 33 * windowed
    with caplog.at_level(logging.INFO):
        tell_of_windows(loaded.config, loaded.model, capacity)
    alike = (60 * full + 33 * windowed) // (full + windowed)
    assert f"{59 / (alike - 1):.2f} times as many" in caplog.text

    async def fill() -> int:
        async with AsyncEngine(loaded) as engine:
            output = await complete(engine, case.prompts[0], greedy(59 * 4 - 3))
            return len(output.token_ids)

    assert asyncio.run(fill()) == 59 * 4 - 3
