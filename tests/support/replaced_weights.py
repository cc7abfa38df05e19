"""A model with two sets of weights, and what an engine answers with each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, random_prompt, spec_named
from support.parity import load_engine
from torch import Tensor

from minisgl.engine import AsyncEngine
from minisgl.engine.weights import AsleepError, WeightsIncompleteError
from minisgl.models.sleeping import tensors_in
from minisgl.request import Request, SamplingParams
from minisgl.runner.runner import ModelRunner

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


def check_slept(**options: Any) -> None:
    """An engine that has slept answers as before, and with weights that come when it wakes as one
    that was loaded with them."""
    before, after = (answers_of(seed, tuple(options.items())) for seed in (0, 1))

    async def run() -> None:
        async with engine_of(0, **options) as engine:
            assert await answers(engine) == before
            captured = engine._runner.capacity.max_graph_batch
            params = replace(GREEDY, max_tokens=12)
            stream = engine.submit(PROMPTS[1], params, cache_salt="slept")
            await anext(stream)
            await engine.weights.sleep()
            engine.audit()
            begun = stream.request.num_output_tokens
            check_memory(engine)
            with pytest.raises(AsleepError) as refused:
                engine.submit(PROMPTS[0], GREEDY)
            assert (refused.value.http_status, refused.value.code) == (503, "asleep")
            await engine.weights.wake(["kv_cache"])
            with pytest.raises(AsleepError, match="The weights are asleep"):
                await engine.weights.update(weights_of(1))
            await engine.weights.wake(["weights"])
            assert engine._runner.capacity.max_graph_batch == captured
            await stream.wait_finished()
            tokens = stream.request.output_token_ids  # those left are computed as of a prompt
            prompt, params = [*PROMPTS[1], *tokens[:begun]], replace(params, max_tokens=12 - begun)
            alone = engine.submit(prompt, params, cache_salt="other")
            await alone.wait_finished()
            assert 0 < begun < 12 and alone.request.output_token_ids == tokens[begun:]
            assert engine.stats().counters.num_retractions == 1
            requests = [await ended(engine, prompt) for prompt in PROMPTS]
            assert [each.num_cached_tokens for each in requests] == [0] * len(PROMPTS)
            assert [(each.output_token_ids, each.logprobs) for each in requests] == before
            await engine.weights.sleep(2, "abort")
            await engine.weights.wake(["weights"])
            await engine.weights.update(weights_of(1))
            with pytest.raises(AsleepError):
                engine.submit(PROMPTS[0], GREEDY)
            await engine.weights.sleep()  # what is awake
            check_memory(engine)
            await engine.weights.wake()
            assert await answers(engine) == after
            await engine.weights.sleep(2)
            await engine.weights.wake()
            with pytest.raises(WeightsIncompleteError, match="The weights were dropped"):
                engine.submit(PROMPTS[0], GREEDY)
            await engine.weights.update_from_files(str(folder_of(0)))
            assert await answers(engine) == before

    asyncio.run(run())


def check_memory(engine: AsyncEngine) -> None:
    """Of a single rank that sleeps, no tensor of the model or of the KV cache has any."""
    runner = engine._runner
    if isinstance(runner, ModelRunner):
        computation = runner._computation
        caches = [each for state in computation.states for each in state.tensors]
        network = getattr(computation._drafter, "_network", None)
        for tensor in (*tensors_in([computation._model, network]), *caches):
            assert tensor.untyped_storage().nbytes() == 0
