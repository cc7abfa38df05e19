"""Runs whose length changes from step to step give the tokens of runs of one token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.draft_policies import AnyDrafts, Clocked, drafting
from support.parity import Case, batch, case_of, load_engine

from minisgl.engine import AsyncEngine
from minisgl.request import SamplingParams
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.runs import DraftCounters

NUM_DRAFTS = 3
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=30, ignore_eos=True),
]


class Recorded(RunChooser):
    """A chooser, and what it has chosen and was told."""

    def __init__(self, policy: RunChooser) -> None:
        super().__init__(policy.num_drafts)
        self.policy = policy
        self.chosen: list[int] = []
        self.told: list[tuple[int, int, int, float | None]] = []

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        self.chosen.append(self.policy.choose(num_rows, num_drafting, is_timed=is_timed))
        return self.chosen[-1]

    def settled(self, *step: Any) -> None:
        num_rows, num_drafting, num_drafts, lengths, seconds = step
        assert not lengths or len(lengths) == num_rows
        assert num_drafting <= num_rows and all(1 <= each <= 1 + num_drafts for each in lengths)
        self.told.append((num_rows, num_drafting, num_drafts, seconds))
        self.policy.settled(*step)


def answers(
    case: Case, policy: RunChooser | None, **options: Any
) -> tuple[list[list[int]], DraftCounters | None]:
    prompts = [(prompt[:9] * 4)[:33] for prompt in case.prompts]
    params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]

    async def run() -> tuple[list[list[int]], DraftCounters | None]:
        loaded = load_engine(case.folder, **options)
        async with AsyncEngine(drafting(loaded, policy)) as engine:
            outputs = await batch(engine, prompts, params)
            engine.audit()
            return [output.token_ids for output in outputs], engine.stats().drafts

    return asyncio.run(run())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_runs_of_any_length_in_turn_change_no_token(measured: bool, overlap: bool) -> None:
    """With the chooser, a clock decides which ones: whatever it says, the tokens are the same."""
    case = case_of("llama3")
    expected, none = answers(case, None)
    assert none is None
    policy = Clocked(NUM_DRAFTS) if measured else AnyDrafts(NUM_DRAFTS, seed=1)
    recorded = Recorded(policy)
    options: Any = {"speculative": "ngram", "draft_tokens": NUM_DRAFTS, "overlap": overlap}
    found, drafts = answers(case, recorded, **options)
    assert found == expected
    assert drafts is not None and drafts.num_rows == sum(rows for rows, *_ in recorded.told)
    # Each step is told once, in the order of the plans, with a time unless it computed a prompt.
    assert [num for _, _, num, _ in recorded.told] == recorded.chosen
    seconds = [each for *_, each in recorded.told]
    assert seconds[0] is None and all(each is None or each > 0 for each in seconds)
    assert sum(each is not None for each in seconds) > 20
    assert any(drafting < rows for rows, drafting, *_ in recorded.told)
    assert {*recorded.chosen} == {0, NUM_DRAFTS} if measured else {*range(NUM_DRAFTS + 1)}
    if not measured:
        assert drafts.num_drafted >= drafts.num_accepted > 0
