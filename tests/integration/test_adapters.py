"""Requests of many adapters and none, in the same steps: each gets the tokens of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.adapters import ALL, Base, train_on
from support.checkpoints import GreedyRun, greedy_reference, load_reference
from support.parity import FEW_PAGES, FOLDER, NOISE, Case, case_of, greedy, load_engine
from transformers import AutoModelForCausalLM

from minisgl.engine import AsyncEngine
from minisgl.request import Request, SamplingParams

NUM_ADAPTERS, NUM_REQUESTS, NUM_TOKENS = 8, 32, 24
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Asked:
    """Requests, of which each has an adapter or none, and their greedy tokens by PEFT."""

    case: Case
    options: dict[str, Any]  # that load the adapters
    prompts: list[list[int]]
    names: list[str | None]
    runs: list[GreedyRun]


@cache
def asked_of(name: str, targets: str = "all") -> Asked:
    """Adapters of ranks 1 to 8. A prompt is asked with several of them."""
    case = case_of(name)
    base = Base(case.folder, AutoModelForCausalLM)
    options: dict[str, Any] = dict(ALL)
    folders = [Path(FOLDER.name) / f"{name}-{targets}-{number}" for number in range(NUM_ADAPTERS)]
    models: list[Any] = [load_reference(case.folder)]
    for number, folder in enumerate(folders):
        of_rank = options | {"r": 1 + number}
        trained = train_on(base, load_reference(case.folder), of_rank, folder, seed=number)
        models.append(trained.model.base_model.model)
    names = [None, *(f"a{number}" for number in range(NUM_ADAPTERS))]
    prompts = [case.prompts[index % len(case.prompts)] for index in range(NUM_REQUESTS)]
    which = [index * 5 % len(models) for index in range(NUM_REQUESTS)]
    runs = [
        greedy_reference(models[model], prompt, NUM_TOKENS)
        for prompt, model in zip(prompts, which, strict=True)
    ]
    lora = tuple(f"a{number}={folder}" for number, folder in enumerate(folders))
    loading = {"lora": lora, "max_lora_rank": 16}
    return Asked(case, loading, prompts, [names[model] for model in which], runs)


async def answer(
    engine: AsyncEngine, prompt: Sequence[int], name: str | None, params: SamplingParams
) -> Request:
    extras = () if name is None else (engine.adapter(name),)
    stream = engine.submit(prompt, params, extras=extras)
    async for _ in stream:
        engine.audit()
    return stream.request


def answers(
    asked: Asked, params: Sequence[SamplingParams], *, together: bool = True, **options: Any
) -> list[Request]:
    async def run() -> list[Request]:
        loaded = load_engine(asked.case.folder, **asked.options, **options)
        async with AsyncEngine(loaded) as engine:
            jobs = [
                answer(engine, *job) for job in zip(asked.prompts, asked.names, params, strict=True)
            ]
            if together:
                return list(await asyncio.gather(*jobs))
            return [await job for job in jobs]

    return asyncio.run(run())


def check_greedy(found: Sequence[int], run: GreedyRun) -> None:
    """Up to a token whose two best logits are equal within the noise."""
    for step, (token, wanted) in enumerate(zip(found, run.token_ids, strict=True)):
        if token != wanted:
            assert run.margins[step] < NOISE * float(run.logits[step].abs().max()), step
            return


def both() -> list[SamplingParams]:
    """Every fourth request is seeded, the others are greedy."""
    return [SEEDED if index % 4 == 3 else greedy(NUM_TOKENS) for index in range(NUM_REQUESTS)]


@cache
def alone(name: str) -> list[list[int]]:
    """The tokens of requests that come one after the other."""
    found = answers(asked_of(name), both(), together=False)
    return [request.output_token_ids for request in found]


def check(name: str, **options: Any) -> list[Request]:
    asked = asked_of(name)
    found = answers(asked, both(), max_loras=3, **options)
    for request, params, run, own in zip(found, both(), asked.runs, alone(name), strict=True):
        if params is SEEDED:
            assert request.output_token_ids == own
        else:
            check_greedy(request.output_token_ids, run)
    return found


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
    ],
    ids=str,
)
def test_each_request_gets_the_tokens_of_its_adapter(options: dict[str, Any]) -> None:
    """32 requests of eight adapters and none, for which there are three places."""
    check("qwen3", **options)


def test_experts_have_adapters_too() -> None:
    check("moe", tp=2, ep=True)


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
