"""Judges whether the step that is waited for takes too long."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping

from minisgl.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

LOOK_S = 1.0
# Steps of one kind differ in size by less than this factor.
SPREAD = 4.0
# A step may compile kernels the first time, which takes a minute or two.
FIRST_LIMIT_S = 300.0
# A rank gives a sign of life every second.
SILENT_AFTER_S = 3.0

Kind = tuple[int, int, int, bool]


class StepWatch:
    """Follows the steps in flight, and remembers how long steps of each kind took.

    Told of every step; judges only in `look`, which is to be called every LOOK_S seconds while a
    step is in flight. The time between two looks counts for at most twice that, so that a process
    which was itself stopped, as by Ctrl-Z, finds no step late when it goes on.
    """

    def __init__(self, timeout_s: float, *, first_limit_s: float = math.inf) -> None:
        """timeout_s: that a step may take longer than ones like it; a third of it is reported.
        first_limit_s: for steps of which none like them has ended."""
        self.stalled: str | None = None  # what is the matter, while a step takes too long
        self._timeout_s = timeout_s
        self._first_limit_s = max(first_limit_s, timeout_s)
        self._plans: deque[StepPlan] = deque()
        self._longest_s: dict[Kind, float] = {}  # of the steps that have ended; 0.0 is under LOOK_S
        self._step = 0  # the one waited for at the last look
        self._looked_s = 0.0
        self._waited_s = 0.0
        self._compiled = False

    @property
    def in_flight(self) -> bool:
        return bool(self._plans)

    def began(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def ended(self) -> None:
        """The step has ended that was launched first of those in flight."""
        plan = self._plans.popleft()
        kind = _kind(plan)
        longest = self._longest_s.setdefault(kind, 0.0)
        if plan.step == self._step and not self._compiled:
            self._longest_s[kind] = max(longest, self._waited_s)
        if self.stalled is not None:
            logger.warning("Step %d has ended after all, in %.0f s", plan.step, self._waited_s)
            self.stalled = None

    def look(self, now: float, *, compiles: bool, silence: Mapping[int, float]) -> str | None:
        """Set `stalled`, and say why the step in flight is to be given up, if it is.

        compiles: kernels may be compiled at the moment. silence: seconds since the last sign of
        life, by rank.
        """
        elapsed, self._looked_s = min(now - self._looked_s, 2 * LOOK_S), now
        if not self._plans:
            return None
        plan = self._plans[0]
        if plan.step != self._step:
            self._step, self._waited_s, self._compiled = plan.step, 0.0, compiles
            return None
        self._compiled |= compiles
        self._waited_s += elapsed
        waited = self._waited_s
        longest = self._longest_s.get(_kind(plan))
        overdue, limit = 0.0, math.inf
        if longest is None:
            limit = self._first_limit_s
        elif compiles:
            limit = FIRST_LIMIT_S + max(SPREAD * longest, self._timeout_s)
        else:
            overdue = waited - SPREAD * longest
        silent = {rank: since for rank, since in silence.items() if since > SILENT_AFTER_S}
        who = ""
        if silent:
            overdue = max(overdue, min(waited, max(silent.values())))
            who = f"; rank {', '.join(map(str, silent))} is silent"
        if overdue > self._timeout_s or waited > limit:
            return f"Step {plan.step} has not ended within {waited:.0f} s{who}."
        if overdue > self._timeout_s / 3:
            stalled = f"Step {plan.step} has run for {waited:.0f} s, unlike others of its size{who}"
            if self.stalled is None:
                logger.warning(
                    "%s; the engine fails %.0f s later (--step-timeout)",
                    stalled,
                    self._timeout_s - overdue,
                )
            self.stalled = f"{stalled}."
        return None


def _kind(plan: StepPlan) -> Kind:
    """What the time of a step depends on: its rows and what they attend to, by powers of two."""
    num_rows, longest, scores = len(plan.decode_slots), plan.longest_decode, False
    for chunk in plan.chunks:
        num_rows += len(chunk.token_ids)
        longest = max(longest, chunk.end)
        scores |= bool(chunk.scored_token_ids)
    return num_rows.bit_length(), longest.bit_length(), len(plan.chunks).bit_length(), scores
