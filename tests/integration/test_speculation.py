"""The whole engine with drafts, in float32: the tokens are those that it gives without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from support.drafters import Kind, KnowingDrafter, num_accepted, num_drafted, watch
from support.followed import audit_once
from support.parity import FEW_PAGES, WAYS, Case, case_of, load_engine
from support.pipelines import Outcome, mixed_outcomes

from minisgl.drafting.drafter import DraftStep
from minisgl.drafting.ngram import NgramDrafter
from minisgl.engine import AsyncEngine
from minisgl.engine.stats import EngineStats
from minisgl.request import Request, SamplingParams
from minisgl.runner.row_order import RowOrder
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan, StepResult

NUM_TOKENS = 30
DP: dict[str, Any] = {"tp": 2, "dp_attention": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
    SamplingParams(
        temperature=1, seed=2, logit_bias={7: 9.0, 11: 9.0}, logprobs=2, max_tokens=NUM_TOKENS
    ),
]


@dataclass
class Run:
    requests: list[Request]
    stats: EngineStats
    plans: Sequence[StepPlan]
    results: Sequence[StepResult]

    @property
    def outputs(self) -> list[tuple[list[int], list[int]]]:
        """The tokens, and those of logprobs."""
        return [
            (request.output_token_ids, [entry.token_id for entry in request.logprobs])
            for request in self.requests
        ]


def run(case: Case, *, abort: bool = False, rounds: int = 1, **options: Any) -> Run:
    """All prompts, and such that repeat themselves, together; in later rounds their prefixes are in
    the cache. abort: some requests leave in the middle."""
    loaded = load_engine(case.folder, **options)
    plans, results = watch(loaded)
    prompts = [*case.prompts, *((prompt[:9] * 4)[:33] for prompt in case.prompts)]

    async def answer(engine: AsyncEngine, index: int) -> Request:
        stream = engine.submit(prompts[index], PARAMS[index % len(PARAMS)])
        async for delta in stream:
            audit_once(engine)
            if abort and index % 3 == 1 and delta.num_output_tokens > 7:
                stream.abort()
        return stream.request

    async def run_all() -> Run:
        requests: list[Request] = []
        async with AsyncEngine(loaded) as engine:
            for _ in range(rounds):
                requests += await asyncio.gather(
                    *(answer(engine, index) for index in range(len(prompts)))
                )
            return Run(requests, engine.stats(), plans, results)

    return asyncio.run(run_all())


@cache
def without(name: str) -> Run:
    return run(case_of(name))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the drafter by one that knows what the requests of a case get."""

    def use(kind: Kind, name: str) -> None:
        streams = [request.token_ids for request in without(name).requests]
        drafter = KnowingDrafter(kind, streams, case_of(name).spec.vocab_size)
        monkeypatch.setattr("minisgl.runner.load.NgramDrafter", drafter)

    return use


@pytest.mark.parametrize(
    ("kind", "way", "num_drafts"),
    [
        *(("right", way, 3) for way in WAYS),
        *(("fading", way, 7) for way in WAYS),
        *((kind, "plain", num_drafts) for kind in ("right", "fading") for num_drafts in (1, 5)),
        *(("wrong", "plain", 3), ("wrong", "padded", 1)),
        *(("random", "chunks", 7), ("random", "few pages", 3)),
        *(("ngram", "plain", 3), ("ngram", "chunks", 1), ("ngram", "padded", 7)),
    ],
)
def test_no_draft_changes_a_token(kind: Any, way: str, num_drafts: int, drafts: Any) -> None:
    if kind != "ngram":
        drafts(kind, "llama3")
    found = run(case_of("llama3"), speculative="ngram", draft_tokens=num_drafts, **WAYS[way])
    assert found.outputs == without("llama3").outputs
    drafted, accepted = num_drafted(found.results), num_accepted(found.results)
    assert drafted > 0
    if kind == "right":
        assert accepted == drafted
        longest = max(max(result.run_lengths or [1]) for result in found.results)
        assert longest == 1 + num_drafts
    else:
        assert accepted == 0 if kind == "wrong" else accepted < drafted
    if way == "few pages":
        assert found.stats.counters.num_retractions > 0
    if way == "padded":
        replayed = [
            result.captured
            for plan, result in zip(found.plans, found.results, strict=True)
            if plan.max_run > 1 and not plan.chunks and len(plan.decode_slots) <= 8
        ]
        assert replayed and all(replayed)


def test_prefix_hits_and_aborts_change_no_token(drafts: Any) -> None:
    drafts("fading", "llama3")
    found = run(case_of("llama3"), speculative="ngram", rounds=2, abort=True, page_size=4)
    expected = without("llama3").outputs
    assert len(found.outputs) == 2 * len(expected)
    for index, (request, output) in enumerate(zip(found.requests, found.outputs, strict=True)):
        wanted = expected[index % len(expected)]
        if index % len(expected) % 3 == 1:
            assert len(output[0]) > 7 and output[0] == wanted[0][: len(output[0])]
        else:
            assert output == wanted
        if index >= len(expected) and request.num_prompt_tokens > 8:
            assert request.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("ngram", "llama3", {"tp": 2}),
        ("fading", "llama3", {"pp": 2, "padded": 4}),
        ("fading", "moe-60", {"pp": 3}),
        ("ngram", "llama3", {**DP, "padded": 8}),
        ("fading", "moe-60", {**DP, **FEW_PAGES}),
        ("fading", "llama3", {**DP, "pp": 2, "overlap": False}),
        ("right", "deepseek-v3", {**DP, "padded": 8}),
    ],
    ids=str,
)
def test_drafts_on_several_ranks_change_no_token(
    kind: Any, name: str, options: dict[str, Any], drafts: Any
) -> None:
    if kind != "ngram":
        drafts(kind, name)
    found = run(case_of(name), speculative="ngram", max_prefill_length=16, **options)
    assert found.outputs == without(name).outputs
    assert bool(found.stats.counters.num_retractions) == ("num_pages" in options)
    drafted, accepted = num_drafted(found.results), num_accepted(found.results)
    assert 0 < accepted == drafted if kind == "right" else 0 < accepted < drafted


def _swap_runs_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = RowOrder.taken
    monkeypatch.setattr(RowOrder, "taken", lambda *given: taken(*given).flip(0))


def _swap_results_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowOrder.sampled_rows

    def swapped(order: RowOrder, plan: StepPlan, shape: StepShape) -> tuple[range, ...]:
        first, second, chunks = rows(order, plan, shape)
        return (second, first, chunks) if len(first) == len(second) else (first, second, chunks)

    monkeypatch.setattr(RowOrder, "sampled_rows", swapped)


def _draft_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = NgramDrafter.draft

    def rolled(self: NgramDrafter, step: DraftStep, *given: Any) -> None:
        draft(self, step, *given)
        slots = step.ending_slots()
        step.state.drafts[slots] = step.state.drafts[slots].roll(1, 0)

    monkeypatch.setattr(NgramDrafter, "draft", rolled)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (_swap_runs_of_ranks, "llama3"),
        # In whose steps both ranks have as many runs.
        (_swap_results_of_ranks, "qwen3"),
        (_draft_for_others, "llama3"),
    ],
)
def test_mistakes_with_the_runs_of_ranks_change_tokens(
    mistake: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 makes them, whose tokens count."""
    expected = without(name).outputs
    mistake(monkeypatch)
    assert run(case_of(name), speculative="ngram", padded=8, **DP).outputs != expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("llama-biased", options) for options in ({}, {"padded": 8}, {"pp": 2})),
        # Prompts that are scored beside runs.
        ("llama-biased", {"max_prefill_length": 16}),
        ("llama-biased", {**DP, "max_prefill_length": 16}),
        ("glm-flash", FEW_PAGES | {"num_pages": 40}),
        ("deepseek-v2", {"padded": 8, "max_prefill_length": 16}),
    ],
    ids=str,
)
def test_rows_of_all_kinds_are_sampled_beside_runs(name: str, options: dict[str, Any]) -> None:
    assert mixed_outcomes(case_of(name), speculative="ngram", **options) == mixed(name)


@cache
def mixed(name: str) -> list[Outcome]:
    return mixed_outcomes(case_of(name))


def test_rows_with_penalties_or_masks_verify_nothing(drafts: Any) -> None:
    drafts("right", "llama3")
    prompts = case_of("llama3").prompts
    loaded = load_engine(case_of("llama3").folder, speculative="ngram")
    _, results = watch(loaded)

    async def answer() -> None:
        async with AsyncEngine(loaded) as engine:
            stream = engine.submit(prompts[2], replace(PARAMS[2], seed=1))
            async for _ in stream:
                pass

    asyncio.run(answer())
    assert results and num_drafted(results) == 0
