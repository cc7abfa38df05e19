"""Warns early, from the first answers of a run, that the measurement will take long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minisgl.bench.online.client import RunProgress
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.bench.workload.requests import ScheduledRequest

LONG_S = 600.0  # a measurement that takes longer than this gets a warning
OFFERED_S = 300.0  # the options that are offered aim at this
# The first moment to judge by: an answer has ended and so long has passed. A server that has ended
# no answer in UNANSWERED_S is judged by the events of its running answers.
ANSWERED_S, UNANSWERED_S = 5.0, 120.0
INTERVAL_S = 1.0
MIN_REQUESTS, MIN_OUTPUT = 4, 16  # the least that is offered


@dataclass(slots=True)
class Outlook:
    """How long the repetitions of one measurement will take, by what one of them has done so far.

    schedule: the requests of a repetition. clock: in seconds; the repetition starts now.
    """

    schedule: Sequence[ScheduledRequest]
    progress: RunProgress
    workload: WorkloadConfig
    repeat: int
    clock: Callable[[], float] = time.perf_counter
    _began: float = field(init=False)
    _num_tokens: int = field(init=False)
    _last_due_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._num_tokens = sum(request.max_tokens for request in self.schedule)
        self._last_due_s = max((request.due_s for request in self.schedule), default=0.0)

    def look(self) -> str | None:
        """The warning; "" if the measurement is short; None if it is too early to tell."""
        elapsed_s = self.clock() - self._began
        answered = self.progress.num_answered > 0
        if elapsed_s < (ANSWERED_S if answered else UNANSWERED_S):
            return None
        done = self._share_done()
        if not done:
            return None
        run_s = elapsed_s / done
        # At the start of a timed schedule few requests have been sent, so that a server that keeps
        # up seems up to twice as slow as it is.
        paced = run_s <= 2 * self._last_due_s
        if paced:
            run_s = self._last_due_s
        total_s = run_s * self.repeat
        if total_s <= LONG_S:
            return ""
        runs = "" if self.repeat == 1 else f", {self.repeat} repetitions of {_time(run_s)}"
        why = "At these times of the requests" if paced else "At the speed of the first answers"
        return (
            f"{why} this measurement takes about {_time(total_s)}{runs}; to measure less, press "
            f"Ctrl-C and give {self._offers(total_s, paced=paced)}"
        )

    def _share_done(self) -> float:
        """The share of the work that is done, 0 to 1.

        Events are counted, those of running answers too. The answers that have ended tell how many
        events a token of an answer takes.
        """
        progress = self.progress
        if self.workload.kind == "embed":
            return progress.num_answered / len(self.schedule)
        events_per_token = 1.0
        if progress.num_answered_tokens:
            events_per_token = progress.num_answered_events / progress.num_answered_tokens
        expected = events_per_token * self._num_tokens
        return min(1.0, progress.num_received / expected) if expected else 0.0

    def _offers(self, total_s: float, *, paced: bool) -> str:
        """The options that make the measurement shorter, each with a value."""
        share = OFFERED_S / total_s
        num_requests = len(self.schedule)
        offers = []
        if num_requests > MIN_REQUESTS:
            offers.append(f"--num-requests {_power(num_requests * share, MIN_REQUESTS)}")
        mean_output = self._num_tokens / num_requests
        has_output = self.workload.kind not in ("embed", "trace")
        if has_output and not paced and mean_output > MIN_OUTPUT:
            offers.append(f"--output-len {_power(mean_output * share, MIN_OUTPUT)}")
        if self.repeat > 1:
            offers.append("--repeat 1")
        if not offers:
            offers.append("a load with less to do")
        *rest, last = offers
        return f"{', '.join(rest)} or {last}" if rest else last


async def warn(outlook: Outlook, say: Callable[[str], object]) -> None:
    """Say the outlook's warning once, as soon as it can tell."""
    while (warning := outlook.look()) is None:  # noqa: ASYNC110
        await asyncio.sleep(INTERVAL_S)
    if warning:
        say(warning)


def _power(number: float, least: int) -> int:
    """The greatest power of two that is at most `number`, but `least` or more."""
    return max(least, 1 << max(0, int(number).bit_length() - 1))


def _time(seconds: float) -> str:
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:,.1f} h"
