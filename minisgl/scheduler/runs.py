"""How many tokens the decode rows of a step may sample, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from minisgl.request import Request
from minisgl.scheduler.launched import Launched
from minisgl.scheduler.plan import StepResult
from minisgl.scheduler.run_lengths import RunChooser
from minisgl.scheduler.state import Running, StepWork


@dataclass(slots=True)
class DraftCounters:
    """Totals of decode rows since the start, and the number of drafts of the last plan."""

    num_rows: int = 0  # each has sampled a token, and one more for each accepted draft
    num_drafted: int = 0  # drafts that were verified
    num_accepted: int = 0  # of these, those that were what was sampled
    num_in_use: int = 0  # drafts of a row that the last plan verifies, at most


class Speculation:
    """Decides how long the runs of a step may be, and counts drafts of steps and of requests."""

    def __init__(self, chooser: RunChooser, max_rows: int | None = None) -> None:
        """max_rows: of a step that verifies drafts, at most; None: any number."""
        self.num_drafts = chooser.num_drafts
        self.counters = DraftCounters()
        self._chooser = chooser
        self._max_rows = max_rows
        self._last_rows: tuple[Collection[Running], int] = ((), 0)  # and those that take drafts

    def max_run(self, work: StepWork) -> int:
        """Maximum number of tokens that each row of a step samples."""
        num_rows = len(work.decoding) + len(work.sampling)
        num_drafting = self._num_drafting(work.decoding) + sum(
            running.takes_drafts for running in work.sampling
        )
        num = 0
        if self._max_rows is None or num_rows * (1 + self.num_drafts) <= self._max_rows:
            num = self._chooser.choose(num_rows, num_drafting, is_timed=not work.chunks)
        self.counters.num_in_use = num
        return 1 + num

    def settled(
        self,
        launched: Launched,
        result: StepResult,
        num_tokens: Mapping[Request, int],
        seconds: float | None,
    ) -> None:
        """Count the drafts of a step. num_tokens: that requests have got. seconds: its time."""
        rows, counters = launched.work.decoding, self.counters
        num_drafting, lengths = self._num_drafting(rows), (result.run_lengths or ())[: len(rows)]
        self._chooser.settled(
            len(rows),
            num_drafting,
            launched.plan.max_run - 1,
            lengths,
            None if launched.work.chunks else seconds,
        )
        counters.num_rows += len(rows)
        if not lengths:
            return
        counters.num_accepted += sum(lengths) - len(rows)
        for running, num in zip(rows, result.num_drafted or (), strict=False):  # chunks follow
            counters.num_drafted += num
            if running.request in num_tokens:
                running.request.num_drafted_tokens += num
        for request, num in num_tokens.items():
            request.num_accepted_tokens += num - 1

    def _num_drafting(self, rows: Sequence[Running]) -> int:
        if rows is not self._last_rows[0]:  # lists of rows are replaced, never changed
            self._last_rows = rows, sum(running.takes_drafts for running in rows)
        return self._last_rows[1]
