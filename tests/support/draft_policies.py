"""Numbers of drafts for tests."""

from __future__ import annotations

import random

from minisgl.scheduler.runs import SameDrafts, Speculation


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
