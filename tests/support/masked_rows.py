"""Rows with and without a fake matcher, of every kind of sampling, run by the whole engine."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from support.fake_matcher import FakeMatcher, Rule, ending_at, held_to, tokens_after
from support.followed import followed
from support.parity import SAMPLED, case_of, greedy, load_engine

from minisgl.engine import AsyncEngine
from minisgl.request import SamplingParams

NUM_TOKENS = 12
CASE = "llama3"
GREEDY = greedy(NUM_TOKENS)
# Every variant of sampling, and rows that leave early.
PARAMS = [GREEDY, *(dataclasses.replace(one, max_tokens=NUM_TOKENS) for one in SAMPLED)]


def rule_of(index: int) -> Rule | None:
    """Two of three rows are masked; some of these come to their end."""
    rule = tokens_after(case_of(CASE).spec.vocab_size, 4 + index % 3)
    return [None, rule, ending_at(7, rule)][index % 3]


Row = tuple[list[int], SamplingParams, Rule | None]


def rows(count: int) -> list[Row]:
    case = case_of(CASE)
    return [
        (
            [*case.prompts[index % 6], index % 50],
            dataclasses.replace(PARAMS[index % 7], seed=index),
            rule_of(index),
        )
        for index in range(count)
    ]


async def tokens_of(engine: AsyncEngine, row: Row) -> list[int]:
    prompt, params, rule = row
    matcher = None if rule is None else FakeMatcher(rule)
    request = await followed(engine, engine.submit(prompt, params, extras=held_to(matcher)))
    if rule is not None:
        for place, token_id in enumerate(request.output_token_ids):
            assert token_id in rule(request.output_token_ids[:place])
    return request.output_token_ids


def outputs(some: list[Row], *, alone: bool = False, **options: Any) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with AsyncEngine(load_engine(case_of(CASE).folder, **options)) as engine:
            if alone:
                return [await tokens_of(engine, row) for row in some]
            got = list(await asyncio.gather(*(tokens_of(engine, row) for row in some)))
            retractions = engine.stats().counters.num_retractions
            assert bool(retractions) == ("schedule_conservativeness" in options)
            return got

    return asyncio.run(run())
