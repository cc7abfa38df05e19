"""Runs of pipelines, whose stages are real processes, against one rank."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from support.fake_matcher import FakeMatcher, held_to
from support.followed import followed
from support.masked_rows import rule_of
from support.parity import SAMPLED, Case, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.parts.scores.host import scores_of
from minisgl.request import Request, SamplingParams

NUM_TOKENS = 14

# What a request ends with: its tokens, their logprobs and those of its prompt.
Outcome = tuple[list[int], list[list[int]], list[list[int]]]


def _params() -> list[SamplingParams]:
    """Every kind of sampling, logprobs of prompts, and prompts that are only scored."""
    scored = dataclasses.replace(SAMPLED[0], logprobs=3, prompt_logprobs=3)
    only_scored = dataclasses.replace(scored, max_tokens=0)
    return [
        *(dataclasses.replace(one, max_tokens=NUM_TOKENS) for one in SAMPLED),
        dataclasses.replace(scored, max_tokens=NUM_TOKENS),
        only_scored,
        greedy(1),
        greedy(NUM_TOKENS),
    ]


def mixed_outcomes(case: Case, **options: Any) -> list[Outcome]:
    """Rows of all kinds, masked ones among them, together; then one alone, with a cached prefix."""
    params = _params()

    async def outcome(engine: AsyncEngine, index: int) -> Outcome:
        rule = rule_of(index)
        chosen = dataclasses.replace(params[index % len(params)], seed=index)
        if rule is not None and not chosen.max_tokens:
            rule = None
        prompt = [*case.prompts[index % len(case.prompts)], index % 50]
        matcher = None if rule is None else FakeMatcher(rule)
        stream = engine.submit(prompt, chosen, extras=held_to(matcher))
        await followed(engine, stream)
        return _outcome(stream.request)

    async def run() -> list[Outcome]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            found = list(await asyncio.gather(*(outcome(engine, index) for index in range(30))))
            stream = engine.submit(case.prompts[2], greedy(NUM_TOKENS))
            await followed(engine, stream)
            found.append(_outcome(stream.request))
            stats = engine.stats()
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
            assert bool(stats.counters.num_retractions) == ("num_pages" in options)
            assert stream.request.num_cached_tokens > 0
            return found

    return asyncio.run(run())


def _outcome(request: Request) -> Outcome:
    """Of logprobs the tokens: the numbers differ in their last bits, as batches are others."""
    shown = [
        [[entry.token_id, *(token for token, _ in entry.top)] for entry in entries]
        for entries in (request.logprobs, scores_of(request))
    ]
    return request.output_token_ids, shown[0], shown[1]
