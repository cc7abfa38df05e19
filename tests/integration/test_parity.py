"""The whole engine against transformers in float32: every path must give the same tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.checkpoints import (
    SPECS,
    load_reference,
    reference_logits,
)
from support.parity import (
    FEW_PAGES,
    NOISE,
    NUM_TOKENS,
    SAMPLED,
    batch,
    case_of,
    check,
    complete,
    count_excused,
    greedy,
    load_engine,
)

from minisgl.attention.base import ForwardBatch
from minisgl.engine import AsyncEngine
from minisgl.errors import StepError
from minisgl.kernels.sampling.reference import SamplingRows, margin, perturb
from minisgl.request import SamplingParams
from minisgl.runner.sampled_rows import SampleRows
from minisgl.runner.step_inputs import SlotTables
from minisgl.runner.step_shape import StepShape
from minisgl.scheduler.plan import StepPlan

ALL = [spec.name for spec in SPECS]
# These, without windows and with, meet any two values of the options. What options change is the
# same code for all models, so that the others have pages of one token and of many, prompts in
# chunks and whole, and padded steps.
IN_ALL_WAYS = ["llama3", "mistral"]
EACH = [("radix", 1, 7), ("naive", 64, 8192)]
PAIRS = [*EACH, ("naive", 16, 7), ("radix", 16, 8192), ("radix", 64, 7), ("naive", 1, 8192)]


@pytest.mark.parametrize(
    ("spec", "cache_type", "page_size", "max_prefill_length"),
    [(spec, *way) for spec in ALL for way in (PAIRS if spec in IN_ALL_WAYS else EACH)],
)
def test_greedy_tokens_equal_those_of_transformers(
    spec: str, cache_type: str, page_size: int, max_prefill_length: int
) -> None:
    check(
        case_of(spec),
        cache_type=cache_type,
        page_size=page_size,
        max_prefill_length=max_prefill_length,
    )


@pytest.mark.parametrize("spec", IN_ALL_WAYS)
def test_one_at_a_time_without_overlap_gives_the_tokens_of_transformers(spec: str) -> None:
    check(case_of(spec), alone=True)
    check(case_of(spec), overlap=False, max_prefill_length=7)


@pytest.mark.parametrize("spec", ALL)
def test_padded_steps_give_the_tokens_of_transformers(spec: str) -> None:
    """Batches over 3 run eagerly, so that the tables pass from one way to the other and back."""
    check(case_of(spec), padded=8, max_prefill_length=7, page_size=4)
    if spec in IN_ALL_WAYS:
        check(case_of(spec), padded=3)


@pytest.mark.parametrize("spec", IN_ALL_WAYS)
@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_changes_no_token(spec: str, overlap: bool) -> None:
    stats, _ = check(case_of(spec), overlap=overlap, **FEW_PAGES)
    assert stats.counters.num_retractions > 0


@pytest.mark.parametrize("spec", ["llama3", "qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_cache_gives_the_tokens_of_a_cold_one(spec: str, page_size: int) -> None:
    case = case_of(spec)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, page_size=page_size)) as engine:
            params = [greedy()] * len(case.prompts)
            cold = await batch(engine, case.prompts, params)
            await count_excused(engine, case, cold)
            warm = await batch(engine, case.prompts, params)
            await count_excused(engine, case, warm)
            for output in warm:
                length = len(output.prompt_token_ids)
                assert output.num_cached_tokens == (length - 1) // page_size * page_size
            # A second turn: what was generated is found again, too.
            turns = [output.prompt_token_ids + output.token_ids for output in cold]
            for turn in await batch(engine, turns, [greedy(1)] * len(turns)):
                length = len(turn.prompt_token_ids)
                assert turn.num_cached_tokens == (length - 1) // page_size * page_size

    asyncio.run(run())


VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {"page_size": 1, "cache_type": "naive", "max_prefill_length": 7},
    {"max_running_requests": 1},
    FEW_PAGES,
    {"padded": 8},
    {"padded": 4, **FEW_PAGES},
]


def sampled(**options: Any) -> list[list[int]]:
    case = case_of("llama3")

    async def run() -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
            retractions = engine.stats().counters.num_retractions
            assert bool(retractions) == ("schedule_conservativeness" in options)
            return [output.token_ids for output in outputs]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def sampled_plainly() -> list[list[int]]:
    return sampled()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant))
def test_sampled_tokens_depend_only_on_seed_and_index(
    variant: dict[str, Any], sampled_plainly: list[list[int]]
) -> None:
    case, got = case_of("llama3"), sampled(**variant)
    for prompt, params, ours, theirs in zip(
        case.prompts, SAMPLED, got, sampled_plainly, strict=True
    ):
        if ours != theirs:  # only a close call may differ, and then all that follows
            step = next(i for i in range(NUM_TOKENS) if ours[i] != theirs[i])
            plain = dataclasses.replace(params, seed=0) == SamplingParams(
                max_tokens=NUM_TOKENS, seed=0
            )
            assert plain, f"token {step} differs"
            reference = load_reference(case.folder)
            logits = reference_logits(reference, [*prompt, *theirs[:step]])[-1:]
            rows = SamplingRows(
                temperature=torch.tensor([params.temperature]),
                seed=torch.tensor([params.seed]),
                output_index=torch.tensor([step]),
            )
            assert margin(perturb(logits, rows))[0] < NOISE


def test_steps_launched_after_a_failed_one_are_discarded() -> None:
    """It would write through the page table of the slot's last owner, into cached pages."""
    case = case_of("llama3")
    long, other = case.prompts[4], case.prompts[3]

    async def run() -> None:
        options: dict[str, Any] = {"max_running_requests": 1, "max_prefill_length": 16}
        async with AsyncEngine(load_engine(case.folder, page_size=4, **options)) as engine:
            expected = await complete(engine, long, greedy(8))
            runner = engine._runner
            join = runner._computation.sampler.join

            def fail(joins: Sequence[object]) -> None:
                if joins:
                    runner._computation.sampler.join = join
                    raise MemoryError("no room for the tables")

            runner._computation.sampler.join = fail
            with pytest.raises(StepError, match="no room for the tables"):
                await complete(engine, other[::-1], greedy(8))
            again = await complete(engine, long, greedy(8))
            assert again.num_cached_tokens > 0
            assert again.token_ids == expected.token_ids

    asyncio.run(run())


@pytest.mark.parametrize("mutation", ["swap pages", "shift positions"])
def test_mistakes_of_the_runner_are_detected(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SlotTables.inputs

    def mutant(
        self: SlotTables, plan: StepPlan | None, shape: StepShape, chunks: torch.Tensor | None
    ) -> tuple[ForwardBatch, SampleRows]:
        assert plan is not None
        if mutation == "swap pages" and len(plan.decode_slots) > 1 and plan.step == 10:
            first, second = plan.decode_slots[:2]
            table = self.state.page_table
            table[[first, second], 0] = table[[second, first], 0]
        inputs, samples = original(self, plan, shape, chunks)
        if mutation == "shift positions" and plan.step > 5:
            shifted = dataclasses.replace(inputs.own, rope=inputs.own.rope + 1)
            inputs = dataclasses.replace(inputs, own=shifted)
        return inputs, samples

    monkeypatch.setattr(SlotTables, "inputs", mutant)
    with pytest.raises(AssertionError, match="no close call"):
        check(case_of("llama3"))
