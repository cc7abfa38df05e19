"""The whole engine against transformers in float32: every path must give the same tokens."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from checkpoints import (
    SPECS,
    GreedyRun,
    Spec,
    greedy_reference,
    load_reference,
    make_checkpoint,
    reference_logits,
    spec_named,
)

from minisgl.attention.base import ForwardBatch
from minisgl.config import EngineConfig, resolve
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import EngineStats
from minisgl.errors import StepError
from minisgl.kernels.sampling.reference import SamplingRows, margin, perturb
from minisgl.models.generation import GenerationDefaults
from minisgl.models.registry import read_model_config
from minisgl.request import RequestOutput, SamplingParams
from minisgl.runner.facts import device_facts
from minisgl.runner.load import load_runner
from minisgl.runner.parallel.tensor_parallel import load_ranks
from minisgl.runner.step_inputs import ChunkTensors, SampleRows, SlotTables, StepShape
from minisgl.scheduler.plan import StepPlan

FOLDER = TemporaryDirectory()
atexit.register(FOLDER.cleanup)
NUM_TOKENS = 64
LENGTHS = (3, 16, 17, 40, 64, 9)
NOISE = 1e-3  # of the logits' scale: what float32 may change
MAX_EXCUSED = 0.01
# So few that running requests have to be retracted.
FEW_PAGES: dict[str, Any] = {
    "num_pages": 40,
    "page_size": 4,
    "max_seq_len_override": 156,
    "schedule_conservativeness": 0.02,
}


@dataclass(frozen=True)
class Case:
    spec: Spec
    folder: Path
    prompts: list[list[int]]
    runs: list[GreedyRun]


@cache
def case_of(name: str) -> Case:
    spec = spec_named(name)
    folder = make_checkpoint(spec, Path(FOLDER.name) / name)
    reference = load_reference(folder)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(spec.vocab_size, (20,), generator=generator).tolist()
    prompts: list[list[int]] = []
    runs: list[GreedyRun] = []
    while len(prompts) < len(LENGTHS):
        length = LENGTHS[len(prompts)]
        own = torch.randint(spec.vocab_size, (length,), generator=generator).tolist()
        prompt = (shared + own)[:length] if length > 20 else own
        run = greedy_reference(reference, prompt, NUM_TOKENS)
        if len(set(run.token_ids)) >= 20:  # not one that falls into a short cycle
            prompts.append(prompt)
            runs.append(run)
    return Case(spec, folder, prompts, runs)


def load_engine(folder: Path, **options: Any) -> Loaded[Any]:
    """The engine on a checkpoint without a tokenizer. `padded`: the largest batch that runs in the
    shape of a captured one."""
    overlap = options.pop("overlap", True)
    padded = options.pop("padded", 0)
    model_config = read_model_config(folder)
    facts = model_config.facts()
    num_pages = 1 + 2048 // options.get("page_size", 16)
    options = {"device": "cpu", "dtype": "float32", "num_pages": num_pages, **options}
    config = resolve(
        EngineConfig(model=str(folder), **options), facts, device_facts(facts), overlap=overlap
    )
    if padded:  # a CPU captures nothing, but runs what would be captured, padded rows and all
        config = dataclasses.replace(config, cuda_graph_max_bs=padded)
    defaults = GenerationDefaults(frozenset())
    if config.tp == 1:
        alone = load_runner(config, model_config, folder)
        return Loaded(alone, config, alone.capacity, facts, None, defaults, "test")
    runner = load_ranks(config, model_config, folder)
    return Loaded(runner, config, runner.capacity, facts, None, defaults, "test", runner)


async def complete(
    engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams
) -> RequestOutput:
    stream = engine.submit(prompt, params)
    async for _ in stream:
        engine.audit()
    request = stream.request
    assert request.finish_reason is not None
    return RequestOutput(
        prompt_token_ids=list(prompt),
        token_ids=request.output_token_ids,
        text="",
        finish_reason=request.finish_reason.value,
        num_cached_tokens=request.num_cached_tokens,
    )


async def batch(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    jobs = [complete(engine, *job) for job in zip(prompts, params, strict=True)]
    return list(await asyncio.gather(*jobs))


async def count_excused(engine: AsyncEngine, case: Case, outputs: list[RequestOutput]) -> int:
    """Compare with transformers. Where the two best logits are equal within the noise, the choice
    is excused and the comparison goes on behind it, on the reference's own tokens."""
    excused = 0
    for prompt, run, output in zip(case.prompts, case.runs, outputs, strict=True):
        at, got = 0, output.token_ids
        while got != run.token_ids[at:]:
            wanted = run.token_ids[at:]
            step = at + next(i for i in range(len(got)) if got[i] != wanted[i])
            scale = float(run.logits[step].abs().max())
            assert run.margins[step] < NOISE * scale, (
                f"{case.spec}: token {step} differs and is no close call"
            )
            excused, at = excused + 1, step + 1
            if at == len(run.token_ids):
                break
            forced = [*prompt, *run.token_ids[:at]]
            got = (await complete(engine, forced, greedy(len(run.token_ids) - at))).token_ids
    assert excused <= MAX_EXCUSED * NUM_TOKENS * len(LENGTHS)
    return excused


def greedy(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def check(case: Case, *, alone: bool = False, **options: Any) -> tuple[EngineStats, list[int]]:
    """Run the case's prompts and compare; returns the counters and each prompt's cached tokens."""

    async def run() -> tuple[EngineStats, list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            params = [greedy()] * len(case.prompts)
            if alone:
                outputs = [await complete(engine, prompt, greedy()) for prompt in case.prompts]
            else:
                outputs = await batch(engine, case.prompts, params)
            await count_excused(engine, case, outputs)
            stats = engine.stats()
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
            return stats, [output.num_cached_tokens for output in outputs]

    return asyncio.run(run())


@pytest.mark.parametrize("spec", [spec.name for spec in SPECS])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_prefill_length", [7, 8192])
def test_greedy_tokens_are_those_of_transformers(
    spec: str, cache_type: str, page_size: int, max_prefill_length: int
) -> None:
    check(
        case_of(spec),
        cache_type=cache_type,
        page_size=page_size,
        max_prefill_length=max_prefill_length,
    )


@pytest.mark.parametrize("spec", [spec.name for spec in SPECS])
def test_one_at_a_time_and_without_look_ahead(spec: str) -> None:
    check(case_of(spec), alone=True)
    check(case_of(spec), overlap=False, max_prefill_length=7)


@pytest.mark.parametrize("spec", [spec.name for spec in SPECS])
@pytest.mark.parametrize("padded", [3, 8])
def test_padded_steps(spec: str, padded: int) -> None:
    """Batches over 3 run eagerly, so that the tables pass from one way to the other and back."""
    check(case_of(spec), padded=padded)
    check(case_of(spec), padded=padded, max_prefill_length=7, page_size=4)


@pytest.mark.parametrize("spec", [spec.name for spec in SPECS])
@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_changes_no_token(spec: str, overlap: bool) -> None:
    stats, _ = check(case_of(spec), overlap=overlap, **FEW_PAGES)
    assert stats.counters.num_retractions > 0


@pytest.mark.parametrize("spec", ["llama3", "qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_warm_cache_gives_what_a_cold_one_does(spec: str, page_size: int) -> None:
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


SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, seed=1),
    SamplingParams(max_tokens=NUM_TOKENS, seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=1.3, top_k=20),
    SamplingParams(max_tokens=NUM_TOKENS, seed=4, min_p=0.05, frequency_penalty=0.5),
    SamplingParams(max_tokens=NUM_TOKENS, seed=5, repetition_penalty=1.3, presence_penalty=1.0),
    SamplingParams(max_tokens=NUM_TOKENS, seed=6, logit_bias={5: 20.0, 6: -100.0}, logprobs=2),
]
VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {"page_size": 1, "cache_type": "naive", "max_prefill_length": 7},
    {"max_running_requests": 1},
    FEW_PAGES,
    {"padded": 8},
    {"padded": 4, **FEW_PAGES},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant))
def test_sampled_tokens_depend_on_seed_and_index_alone(variant: dict[str, Any]) -> None:
    case = case_of("llama3")

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
            retractions = engine.stats().counters.num_retractions
            assert bool(retractions) == ("schedule_conservativeness" in options)
            return [output.token_ids for output in outputs]

    expected, got = asyncio.run(run({})), asyncio.run(run(variant))
    reference = load_reference(case.folder)
    for prompt, params, ours, theirs in zip(case.prompts, SAMPLED, got, expected, strict=True):
        if ours != theirs:  # only a close call may differ, and then all that follows
            step = next(i for i in range(NUM_TOKENS) if ours[i] != theirs[i])
            plain = dataclasses.replace(params, seed=0) == SamplingParams(max_tokens=64, seed=0)
            assert plain, f"token {step} differs"
            logits = reference_logits(reference, [*prompt, *theirs[:step]])[-1:]
            rows = SamplingRows(
                temperature=torch.tensor([params.temperature]),
                seed=torch.tensor([params.seed]),
                output_index=torch.tensor([step]),
            )
            assert margin(perturb(logits, rows))[0] < NOISE


def test_what_was_launched_behind_a_failed_step_does_not_run() -> None:
    """It would write through the page table of the slot's last owner, into cached pages."""
    case = case_of("llama3")
    long, other = case.prompts[4], case.prompts[3]

    async def run() -> None:
        options: dict[str, Any] = {"max_running_requests": 1, "max_prefill_length": 16}
        async with AsyncEngine(load_engine(case.folder, page_size=4, **options)) as engine:
            expected = await complete(engine, long, greedy(8))
            runner = engine._runner
            join = runner._sampler.join

            def fail(joins: Sequence[object]) -> None:
                if joins:
                    runner._sampler.join = join
                    raise MemoryError("no room for the tables")

            runner._sampler.join = fail
            with pytest.raises(StepError, match="no room for the tables"):
                await complete(engine, other[::-1], greedy(8))
            again = await complete(engine, long, greedy(8))
            assert again.num_cached_tokens > 0
            assert again.token_ids == expected.token_ids

    asyncio.run(run())


@pytest.mark.parametrize("mutation", ["swap pages", "shift positions"])
def test_mistakes_of_the_runner_show(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotTables.inputs

    def mutant(
        self: SlotTables, plan: StepPlan | None, shape: StepShape, chunks: ChunkTensors | None
    ) -> tuple[ForwardBatch, SampleRows]:
        assert plan is not None
        if mutation == "swap pages" and len(plan.decode_slots) > 1 and plan.step == 10:
            first, second = plan.decode_slots[:2]
            table = self.state.page_table
            table[[first, second], 0] = table[[second, first], 0]
        inputs, samples = original(self, plan, shape, chunks)
        if mutation == "shift positions" and plan.step > 5:
            inputs = dataclasses.replace(inputs, positions=inputs.positions + 1)
        return inputs, samples

    monkeypatch.setattr(SlotTables, "inputs", mutant)
    with pytest.raises(AssertionError, match="no close call"):
        check(case_of("llama3"))
