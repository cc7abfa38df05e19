"""Detects a step in flight that takes too long."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping

from minisgl.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

LOOK_S = 1.0
# Bound on the ratio of the sizes of two steps of one kind.
SPREAD = 4.0
# The first step of a kind may compile kernels, which takes a minute or two.
FIRST_LIMIT_S = 300.0
# Ranks send a heartbeat every second.
SILENT_AFTER_S = 3.0

Kind = tuple[int, int, int, bool]


class StepWatch:
    """Follows the steps in flight and remembers how long steps of each kind took.

    Call `began` and `ended` for every step, and `look` every LOOK_S seconds while a step is in
    flight. The time between two looks counts for at most 2 · LOOK_S, so that no step seems late
    after the process itself was stopped (Ctrl-Z).
    """

    def __init__(self, timeout_s: float, *, first_limit_s: float = math.inf) -> None:
        """timeout_s: the time by which a step may exceed others of its kind; it is reported as
        stalled after a third of that. first_limit_s: limit for the first step of a kind."""
        self.stalled: str | None = None  # a description of the stalled step, None if there is none
        self._timeout_s = timeout_s
        self._first_limit_s = max(first_limit_s, timeout_s)
        self._plans: deque[StepPlan] = deque()
        self._longest_s: dict[Kind, float] = {}  # of ended steps; 0.0: less than LOOK_S
        self._step = 0  # the oldest in flight at the last look
        self._looked_s = 0.0
        self._waited_s = 0.0
        self._compiled = False

    @property
    def in_flight(self) -> bool:
        return bool(self._plans)

    def began(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def ended(self) -> None:
        """Record that the oldest step in flight has ended."""
        plan = self._plans.popleft()
        kind = _kind(plan)
        longest = self._longest_s.setdefault(kind, 0.0)
        if plan.step == self._step and not self._compiled:
            self._longest_s[kind] = max(longest, self._waited_s)
        if self.stalled is not None:
            logger.warning("Step %d has ended after all, in %.0f s", plan.step, self._waited_s)
            self.stalled = None

    def look(self, now: float, *, compiles: bool, silence: Mapping[int, float]) -> str | None:
        """Update `stalled`; returns the reason to give up the step in flight, None to go on.

        now: time.monotonic. compiles: True if kernels may be compiling. silence: seconds since the
        last heartbeat, by rank.
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
    """The kind of a step, for steps of similar duration: numbers of rows, context and chunks, each
    rounded to a power of two, and whether a part reads the rows."""
    num_rows, longest = len(plan.decode_slots), plan.longest_decode
    reads_rows = any(part.reads_rows for part in plan.parts)
    for chunk in plan.chunks:
        num_rows += len(chunk.token_ids)
        longest = max(longest, chunk.end)
    return num_rows.bit_length(), longest.bit_length(), len(plan.chunks).bit_length(), reads_rows
