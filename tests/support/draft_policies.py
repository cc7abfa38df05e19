"""Numbers of drafts for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import pytest

from minisgl.engine import startup
from minisgl.engine.protocols import Handle
from minisgl.engine.startup import Loaded
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.runs import Speculation

DRAFT_S = 0.1  # what a draft adds to a step of 1 s


class SameDrafts(RunChooser):
    """The same number in each step."""

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        return self.num_drafts

    def settled(self, *_: object) -> None:
        pass


class AnyDrafts(SameDrafts):
    """0 to num_drafts drafts in each step, by chance."""

    def __init__(self, num_drafts: int, seed: int) -> None:
        super().__init__(num_drafts)
        self._random = random.Random(seed)

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        return self._random.randint(0, self.num_drafts)


def speculation_of(max_run: int, vary_with: int | None = None) -> Speculation | None:
    """For runs of up to `max_run` tokens in each step, or of numbers by chance, with a seed."""
    num = max_run - 1
    if not num:
        return None
    return Speculation(SameDrafts(num) if vary_with is None else AnyDrafts(num, vary_with))


@dataclass(frozen=True, slots=True)
class _Drafting(Loaded[Handle]):
    """The parts of an engine, and what decides about its drafts in place of a clock."""

    chooser: RunChooser = field(default_factory=lambda: SameDrafts(0))

    def speculation(self) -> Speculation | None:
        config = self.config
        return Speculation(self.chooser, config.max_run_rows) if config.num_drafts else None


def drafting(loaded: Loaded[Handle], chooser: RunChooser | None = None) -> Loaded[Handle]:
    """The same engine with another chooser; None: drafts in each step."""
    parts = {spec.name: getattr(loaded, spec.name) for spec in fields(Loaded)}
    return _Drafting(**parts, chooser=chooser or SameDrafts(loaded.config.num_drafts))


class Clocked(RunChooser):
    """A chooser with a clock of its own: steps take as long as their drafts say, on any machine."""

    def settled(
        self,
        num_rows: int,
        num_drafting: int,
        num_drafts: int,
        run_lengths: Sequence[int],
        seconds: float | None,
    ) -> None:
        told = None if seconds is None else 1 + DRAFT_S * num_drafts
        super().settled(num_rows, num_drafting, num_drafts, run_lengths, told)


def choose_by_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that start choose their drafts by this clock."""
    monkeypatch.setattr(startup, "RunChooser", Clocked)
