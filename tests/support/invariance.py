"""Answers of engines in bits: of each request by itself, and in every other way to compute it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.checkpoints import Spec, make_checkpoint, random_prompt, spec_named
from support.followed import followed
from support.parity import load_engine

from minisgl.engine import AsyncEngine
from minisgl.parts.scores.host import scores_of
from minisgl.request import Request, SamplingParams, TokenLogprobs

FOLDER = TemporaryDirectory()
SPECS = {name: spec_named(name) for name in ("qwen3", "moe", "mistral")}
# Of several tiles in each direction, 25 tokens in a program of attention, and logits whose rows are
# aligned in different ways.
SPECS["wide"] = replace(
    SPECS["qwen3"],
    name="wide",
    num_heads=10,
    num_kv_heads=2,
    hidden_size=1280,
    vocab_size=8001,
    tied=False,
    sharded=False,
)
SPECS["wide-moe"] = replace(
    SPECS["moe"],
    name="wide-moe",
    num_heads=8,
    head_dim=128,
    hidden_size=1024,
    vocab_size=8000,
    extra={
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
)
Bits = tuple[tuple[int, ...], ...]


@cache
def folder_of(name: str) -> Path:
    return make_checkpoint(SPECS[name], Path(FOLDER.name) / name)


def jobs_of(
    spec: Spec, lengths: Sequence[int], num_tokens: int
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, of which some share a beginning, and parameters of all kinds."""
    shared = random_prompt(spec, max(lengths), 99)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0, "prompt_logprobs": 2},
    ]
    jobs = []
    for seed, length in enumerate(lengths):
        prompt = random_prompt(spec, length, seed)
        if seed % 2:
            prompt[: length // 2] = shared[: length // 2]
        params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True, logprobs=3)
        jobs.append((prompt, replace(params, **kinds[seed % len(kinds)])))
    return jobs


def bits_of(request: Request) -> Bits:
    """Tokens, and the bits of all logprobs of the request."""

    def numbers(entry: TokenLogprobs | None) -> tuple[int, ...]:
        if entry is None:
            return ()
        logprobs = [entry.logprob, *(logprob for _, logprob in entry.top)]
        bits = struct.unpack(f"{len(logprobs)}i", struct.pack(f"{len(logprobs)}f", *logprobs))
        return entry.token_id, *(token for token, _ in entry.top), *bits

    scored = [*scores_of(request), *(request.logprobs or ())]
    return tuple(request.output_token_ids), *map(numbers, scored)


async def bits(
    engine: AsyncEngine, jobs: Sequence[tuple[list[int], SamplingParams]], *, together: bool = True
) -> list[Bits]:
    """Of all jobs, at once or one after the other."""
    if together:
        streams = [engine.submit(*job) for job in jobs]
        return [
            bits_of(each) for each in await asyncio.gather(*(followed(engine, s) for s in streams))
        ]
    return [bits_of(await followed(engine, engine.submit(*job))) for job in jobs]


def engine_of(name: str, **options: Any) -> AsyncEngine:
    return AsyncEngine(load_engine(folder_of(name), **{"batch_invariant": True, **options}))


def bits_in(name: str, jobs: Sequence[Any], *, together: bool = True, **options: Any) -> list[Bits]:
    async def run() -> list[Bits]:
        async with engine_of(name, **options) as engine:
            return await bits(engine, jobs, together=together)

    return asyncio.run(run())


def num_equal(found: Sequence[Bits], expected: Sequence[Bits]) -> int:
    """The number of equal answers."""
    return sum(one == other for one, other in zip(found, expected, strict=True))
