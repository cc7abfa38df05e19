"""Whole runs of the engine on small checkpoints, compared with transformers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from support.checkpoints import (
    GreedyRun,
    Spec,
    greedy_reference,
    load_reference,
    make_checkpoint,
    random_prompt,
    spec_named,
)
from support.draft_policies import drafting
from support.followed import followed
from support.forked_ranks import forked_ranks
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import EngineStats
from minisgl.models.generation import GenerationDefaults
from minisgl.ranks.several_ranks import SeveralRanks, load_ranks
from minisgl.request import RequestOutput, SamplingParams
from minisgl.runner import setup as setup_phase
from minisgl.runner.load import load_runner
from minisgl.runner.runner import ModelRunner
from minisgl.runner.setup import read_setup
from minisgl.tiers.disk.disk_cache import check_folder

FOLDER = TemporaryDirectory()
atexit.register(FOLDER.cleanup)
NUM_TOKENS = 20  # the longest prompt ends at a page of 64, others cross one of 16 on the way
LENGTHS = (3, 16, 17, 40, 64, 9)
NOISE = 1e-3  # of the logits' scale: what float32 may change
MAX_EXCUSED = 1  # tokens of a run
# So few that running requests have to be retracted.
FEW_PAGES: dict[str, Any] = {
    "num_pages": 34,
    "page_size": 4,
    "max_seq_len_override": 132,
    "schedule_conservativeness": 0.02,
}
# How one rank may compute the same requests.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"page_size": 1, "max_prefill_length": 7},
    "padded": {"padded": 8, "max_prefill_length": 16},
    "no overlap": {"overlap": False},
    "few pages": FEW_PAGES,
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
        if (run := varied_run(reference, prompt)) is not None:
            prompts.append(prompt)
            runs.append(run)
    return Case(spec, folder, prompts, runs)


def varied_run(reference: PreTrainedModel, prompt: Sequence[int]) -> GreedyRun | None:
    """The reference's greedy tokens, unless they fall into a short cycle."""
    run = greedy_reference(reference, prompt, NUM_TOKENS)
    return run if 2 * len({*run.token_ids}) >= NUM_TOKENS else None


def three_prompts(spec: Spec, folder: Path, reference: PreTrainedModel) -> Case:
    """A case for a checkpoint that is made elsewhere."""
    asked = (
        random_prompt(spec, length, seed)
        for seed, length in itertools.product(range(9), (3, 17, 40))
    )
    found = ((prompt, run) for prompt in asked if (run := varied_run(reference, prompt)))
    prompts, runs = zip(*itertools.islice(found, 3), strict=True)
    assert len(runs) == 3, "a checkpoint without teeth"
    return Case(spec, folder, [*prompts], [*runs])


def load_engine(folder: Path, **options: Any) -> Loaded[Any]:
    """The engine on a checkpoint without a tokenizer, which verifies drafts in each step if it may
    do so in any. `padded`: the largest batch that runs in the shape of a captured one.
    `model_config`: what was read in `folder` before."""
    padded, overlap = options.pop("padded", 0), options.pop("overlap", True)
    known = options.pop("model_config", None)
    num_pages = 1 + 2048 // options.get("page_size", 16)
    options = {"device": "cpu", "dtype": "float32", "num_pages": num_pages, **options}
    with contextlib.ExitStack() as patched:
        if known is not None:
            read = mock.patch.object(setup_phase, "read_model_config", return_value=known)
            patched.enter_context(read)
        setup = read_setup(EngineConfig(model=str(folder), **options))
    config = dataclasses.replace(setup.config, overlap=overlap)
    if padded:  # a CPU captures nothing, but runs what would be captured, padded rows and all
        config = dataclasses.replace(config, cuda_graph_max_bs=padded)
    if config.disk_cache:
        check_folder(config)
    setup = dataclasses.replace(setup, config=config)
    runner: ModelRunner | SeveralRanks
    if config.num_ranks == 1:
        runner = load_runner(setup)
    else:
        with forked_ranks():
            runner = load_ranks(setup)
    return drafting(
        Loaded(
            runner=runner,
            config=config,
            capacity=runner.capacity,
            model=setup.facts,
            tokenizer=None,
            defaults=GenerationDefaults(frozenset()),
            model_name="test",
            ranks=runner.others if isinstance(runner, SeveralRanks) else None,
            disk=runner.disk,
            adapters=runner.adapters,
            weights=runner.weights,
            sight=setup.sight,
        )
    )


async def complete(
    engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams
) -> RequestOutput:
    request = await followed(engine, engine.submit(prompt, params))
    assert request.finish_reason is not None
    return RequestOutput(
        prompt_token_ids=list(prompt),
        token_ids=request.output_token_ids,
        text="",
        finish_reason=request.finish_reason.value,
        num_cached_tokens=request.num_cached_tokens,
        num_drafted_tokens=request.num_drafted_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
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
    assert excused <= MAX_EXCUSED
    return excused


def greedy(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def cut(case: Case, num_tokens: int) -> Case:
    """The case with outputs of so many tokens."""
    runs = [GreedyRun(run.token_ids[:num_tokens], run.logits[:num_tokens]) for run in case.runs]
    return dataclasses.replace(case, runs=runs)


def check(case: Case, *, alone: bool = False, **options: Any) -> tuple[EngineStats, list[int]]:
    """Run the case's prompts and compare; returns the counters and each prompt's cached tokens."""

    async def run() -> tuple[EngineStats, list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            params = [greedy()] * len(case.prompts)
            if alone:
                jobs = zip(case.prompts, params, strict=True)
                outputs = [await complete(engine, *job) for job in jobs]
            else:
                outputs = await batch(engine, case.prompts, params)
            await count_excused(engine, case, outputs)
            stats = engine.stats()
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
            return stats, [output.num_cached_tokens for output in outputs]

    return asyncio.run(run())


SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, seed=1),
    SamplingParams(max_tokens=NUM_TOKENS, seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=1.3, top_k=20),
    SamplingParams(max_tokens=NUM_TOKENS, seed=4, min_p=0.05, frequency_penalty=0.5),
    SamplingParams(max_tokens=NUM_TOKENS, seed=5, repetition_penalty=1.3, presence_penalty=1.0),
    SamplingParams(max_tokens=NUM_TOKENS, seed=6, logit_bias={5: 20.0, 6: -100.0}, logprobs=2),
]
