"""A model with two sets of weights, and what an engine answers with each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, random_prompt, spec_named
from support.parity import load_engine
from torch import Tensor

from minisgl.engine import AsyncEngine
from minisgl.request import Request, SamplingParams

SPEC = spec_named("qwen3")
FOLDER = TemporaryDirectory()
NORM = "model.norm.weight"
PROMPTS = [random_prompt(SPEC, length, seed) for seed, length in enumerate((9, 33, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)


@cache
def folder_of(seed: int) -> Path:
    return make_checkpoint(replace(SPEC, seed=seed), Path(FOLDER.name) / str(seed))


@cache
def weights_of(seed: int) -> dict[str, Tensor]:
    files = folder_of(seed).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def engine_of(seed: int, **options: Any) -> AsyncEngine:
    given = {"page_size": 4, "max_prefill_length": 16, **options}
    return AsyncEngine(load_engine(folder_of(seed), **given))


async def ended(engine: AsyncEngine, prompt: Sequence[int], **sampling: Any) -> Request:
    stream = engine.submit(prompt, replace(GREEDY, **sampling))
    await stream.wait_finished()
    engine.audit()
    return stream.request


async def answers(engine: AsyncEngine) -> list[Any]:
    """Tokens and their log probabilities, one request after the other: these are equal in bits."""
    requests = [await ended(engine, prompt) for prompt in PROMPTS]
    return [(each.output_token_ids, each.logprobs) for each in requests]


@cache
def answers_of(seed: int, options: tuple[tuple[str, int], ...] = ()) -> list[Any]:
    async def run() -> list[Any]:
        async with engine_of(seed, **dict(options)) as engine:
            return await answers(engine)

    return asyncio.run(run())


def check_replaced(**options: Any) -> None:
    """An engine whose weights are replaced, and back, answers as those that were loaded with
    them."""
    before, after = (answers_of(seed, tuple(options.items())) for seed in (0, 1))
    assert before != after

    async def run() -> None:
        async with engine_of(0, **options) as engine:
            assert await answers(engine) == before
            assert await engine.weights.update(weights_of(1), version="one") == "one"
            assert await answers(engine) == after
            assert await engine.weights.update_from_files(str(folder_of(0))) != "one"
            assert await answers(engine) == before

    asyncio.run(run())
