"""Numbers of drafts for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from minisgl.engine import startup
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.runs import DraftPolicy, SameDrafts, Speculation

DRAFT_S = 0.1  # what a draft adds to a step of 1 s


class AnyDrafts:
    """0 to num_drafts drafts in each step, by chance."""

    def __init__(self, num_drafts: int, seed: int) -> None:
        self._num_drafts = num_drafts
        self._random = random.Random(seed)

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        return self._random.randint(0, self._num_drafts)

    def settled(self, *_: object) -> None:
        pass


def speculation_of(max_run: int, vary_with: int | None = None) -> Speculation | None:
    """For runs of up to `max_run` tokens in each step, or of numbers by chance, with a seed."""
    num = max_run - 1
    if not num:
        return None
    return Speculation(SameDrafts(num) if vary_with is None else AnyDrafts(num, vary_with), num)


class Clocked:
    """A policy with a clock of its own: steps take as long as their drafts say, on any machine."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        return self._policy.choose(num_rows, num_drafting, is_timed=is_timed)

    def settled(
        self,
        num_rows: int,
        num_drafting: int,
        num_drafts: int,
        run_lengths: Sequence[int],
        seconds: float | None,
    ) -> None:
        told = None if seconds is None else 1 + DRAFT_S * num_drafts
        self._policy.settled(num_rows, num_drafting, num_drafts, run_lengths, told)


def choose_by_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that start choose their drafts by this clock."""
    monkeypatch.setattr(startup, "RunChooser", lambda options: Clocked(RunChooser(options)))
