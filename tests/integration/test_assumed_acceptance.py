"""--draft-acceptance: drafts are accepted by chance, so that speed can be measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.parity import batch, case_of, load_engine

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.request import RequestOutput, SamplingParams
from minisgl.scheduler.runs import DraftCounters

GIVEN: dict[str, Any] = {"load_format": "dummy", "speculative": "ngram"}


def run(
    acceptance: float | None, *, num_requests: int = 6, num_tokens: int = 64, **options: Any
) -> tuple[list[RequestOutput], DraftCounters | None]:
    case = case_of("llama3")
    prompts = [[5 + index, 7, 9] for index in range(num_requests)]
    params = [
        SamplingParams(max_tokens=num_tokens, seed=index, ignore_eos=True)
        for index in range(num_requests)
    ]

    async def main() -> tuple[list[RequestOutput], DraftCounters | None]:
        loaded = load_engine(case.folder, **GIVEN, draft_acceptance=acceptance, **options)
        async with AsyncEngine(loaded) as engine:
            outputs = await batch(engine, prompts, params)
            engine.audit()
            return outputs, engine.stats().drafts

    return asyncio.run(main())


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_all_drafts_are_accepted_or_none(num_drafts: int) -> None:
    _, every = run(1.0, draft_tokens=num_drafts)
    assert every is not None and every.num_accepted == every.num_drafted
    assert every.num_accepted == num_drafts * every.num_rows
    outputs, none = run(0.0, draft_tokens=num_drafts)
    assert none is not None and none.num_accepted == 0
    assert none.num_drafted == num_drafts * none.num_rows
    assert all(len(output.token_ids) == 64 for output in outputs)


def test_each_draft_is_accepted_with_the_probability_if_the_one_before_was() -> None:
    outputs, drafts = run(0.7, num_requests=12, num_tokens=300, draft_tokens=3)
    assert drafts is not None
    # Where a request ends, its last run may have no page.
    assert 2.95 * drafts.num_rows < drafts.num_drafted <= 3 * drafts.num_rows
    expected = 0.7 + 0.7**2 + 0.7**3  # of 3
    assert drafts.num_accepted / drafts.num_rows == pytest.approx(expected, abs=0.06)
    shares = [output.num_accepted_tokens / output.num_drafted_tokens for output in outputs]
    assert len({*shares}) > 6  # seeds have coins of their own


def test_a_request_accepts_the_same_drafts_in_any_batch() -> None:
    together, _ = run(0.5, num_requests=5)
    alone, _ = run(0.5, num_requests=1)
    for name in ("token_ids", "num_drafted_tokens", "num_accepted_tokens"):
        assert getattr(together[0], name) == getattr(alone[0], name)


def test_rows_that_take_no_drafts_are_left_alone() -> None:
    case = case_of("llama3")
    params = [SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=0.5, temperature=0)]
    prompts = [[5, 7, 9]]

    async def main(**options: Any) -> list[int]:
        loaded = load_engine(case.folder, load_format="dummy", **options)
        async with AsyncEngine(loaded) as engine:
            [output] = await batch(engine, prompts, params)
            assert output.num_drafted_tokens == 0
            return output.token_ids

    drafting = asyncio.run(main(speculative="ngram", draft_acceptance=1.0))
    assert drafting == asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft_acceptance": 1.2}, "allowed: 0 to 1"),
        ({"load_format": "auto"}, "only for speed"),
        ({"speculative": None}, "without --speculative"),
    ],
)
def test_it_is_refused_where_it_would_do_harm_or_nothing(
    options: dict[str, Any], reason: str
) -> None:
    config = EngineConfig(**GIVEN, draft_acceptance=0.7)
    with pytest.raises(ConfigError, match=reason):
        replace(config, **options)
