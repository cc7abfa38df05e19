"""Whether the rows of a step verify drafts: where that brings more tokens a second.

A step that verifies drafts takes longer; how much longer depends on the model, the device and the
number of rows. Drafts that are accepted save steps; how many are depends on the text and the
drafter. So both are measured while the engine runs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

# Of all decode steps, the part that trials may cost; and the least number of steps between trials.
SHARE, LEAST_BETWEEN = 0.004, 64
# A trial has so many steps; one of drafts has more, until so many rows have shown whether theirs
# are right. Its first step verifies nothing if the steps before it drafted nothing.
TRIAL_STEPS, TRIAL_ROWS = 4, 12
# Each trial that changes nothing doubles the time to the next one, up to so many times.
MOST_DOUBLINGS = 3
# The number of step times that are kept, with drafts and without; a trial begins after so many.
NUM_TIMES, LEAST_TIMES = 8, 3
# How much better the other way must be than the one in use.
MARGIN = 1.02
# Acceptance is that of the last rows, so many; before there are any, it is assumed as if of a few.
ROWS_REMEMBERED, ROWS_ASSUMED, ASSUMED_ACCEPTANCE = 128, 4, 0.6
# Before anything is measured, a draft for each of 2**8 rows is taken to double the time of a step.
DEAR_ROWS = 8


class Acceptance:
    """The part of the drafts that are accepted, by position in the run, of those whose predecessor
    was accepted. A draft that is missing, because the drafter found none, counts as rejected."""

    def __init__(self, num_drafts: int) -> None:
        self._verified = [float(ROWS_ASSUMED)] * num_drafts
        self._accepted = [ROWS_ASSUMED * ASSUMED_ACCEPTANCE] * num_drafts

    def add(self, num_rows: int, run_lengths: Sequence[int]) -> None:
        """Record a step in which `num_rows` rows had drafts. run_lengths: of these rows, and of any
        others, which are 1."""
        lengths = Counter(run_lengths)
        verified = num_rows
        for position in range(len(self._verified)):
            accepted = sum(num for length, num in lengths.items() if length > position + 1)
            self._fade(position, max(0.0, 1 - verified / ROWS_REMEMBERED))
            self._verified[position] += verified
            self._accepted[position] += accepted
            verified = accepted

    def forget(self) -> None:
        """Let what was seen before weigh little against what comes."""
        for position, verified in enumerate(self._verified):
            self._fade(position, min(1.0, ROWS_ASSUMED / verified))

    def _fade(self, position: int, factor: float) -> None:
        self._verified[position] *= factor
        self._accepted[position] *= factor

    @property
    def expected_run(self) -> float:
        """The expected number of tokens of a row with drafts."""
        run = reached = 1.0
        for accepted, verified in zip(self._accepted, self._verified, strict=True):
            reached *= accepted / verified
            run += reached
        return run


def _times() -> deque[float]:
    return deque(maxlen=NUM_TIMES)


@dataclass(slots=True)
class _Bucket:
    """What is known of steps whose numbers of rows have the same power of two above them."""

    cost: float  # how long a step with drafts takes, over one without
    is_measured: bool = False  # the cost is, not only estimated
    drafts: bool = False  # the way in use
    num_left: int = 0  # steps of the trial of the other way; 0: none is under way
    num_steps: int = 0  # since the last trial, or since the other way was last in use
    num_between: float = 0.0  # steps from then to the next trial
    num_vain: int = 0  # trials that have changed nothing since then
    last_step: int = 0
    times_with: deque[float] = field(default_factory=_times)  # seconds
    times_without: deque[float] = field(default_factory=_times)

    def times(self, drafts: bool) -> deque[float]:
        return self.times_with if drafts else self.times_without

    def measured_cost(self) -> float:
        return median(self.times_with) / median(self.times_without)


class _Rows(NamedTuple):
    """The decode rows of a step."""

    num: int
    num_drafting: int  # of them, those that take drafts; at least 1

    @property
    def bucket(self) -> int:
        return (self.num - 1).bit_length()

    def num_trial_steps(self, drafts: bool) -> int:
        more = 1 + math.ceil(TRIAL_ROWS / self.num_drafting) if drafts else 0
        return max(TRIAL_STEPS, more)


class RunChooser:
    """Chooses for each step whether its rows verify drafts.

    Now and then the way that is not in use is tried for a few steps. The cost of drafts is the
    ratio of the times of these steps and of those just before them, so that contexts that grow do
    not change it. The tokens to expect follow from the acceptance of all rows. The more a trial has
    lost, the later the next one. What is chosen changes no token of any request.
    """

    def __init__(self, num_drafts: int) -> None:
        """num_drafts: of each row, in a step with drafts."""
        self.num_drafts = num_drafts
        self.acceptance = Acceptance(num_drafts)
        self._step = 0  # number of timed steps that were planned
        self._buckets: dict[int, _Bucket] = {}
        self._last_verified = 0  # number of drafts of the last step that has ended

    def choose(self, num_rows: int, num_drafting: int, *, is_timed: bool) -> int:
        """The number of drafts for a step of `num_rows` decode rows, of which `num_drafting` take
        any. is_timed: `settled` will get its time, because it computes no prompt besides."""
        if not num_drafting:
            return 0
        rows = _Rows(num_rows, num_drafting)
        bucket = self._bucket(rows)
        if is_timed:
            self._advance(bucket, rows)
        is_trial = is_timed and bucket.num_left > 0
        return self.num_drafts if bucket.drafts != is_trial else 0

    def settled(
        self,
        num_rows: int,
        num_drafting: int,
        num_drafts: int,
        run_lengths: Sequence[int],
        seconds: float | None,
    ) -> None:
        """Record a step that has ended, in the order of the plans. run_lengths: of its decode rows;
        empty if all are 1. seconds: the time that it took; None if it computed a prompt, too."""
        # Without drafts in the last step nothing could be accepted, unless the drafter always
        # drafts.
        if num_drafts and (self._last_verified or max(run_lengths, default=1) > 1):
            self.acceptance.add(num_drafting, run_lengths)
        self._last_verified = num_drafts
        if seconds is not None and num_drafting:
            self._bucket(_Rows(num_rows, num_drafting)).times(num_drafts > 0).append(seconds)

    # -- trials ------------------------------------------------------------------------------------

    def _advance(self, bucket: _Bucket, rows: _Rows) -> None:
        """Count one more step: begin a trial, go on with it, or end it."""
        self._step += 1
        if self._step - bucket.last_step > LEAST_BETWEEN:
            bucket.num_left = 0  # the times of then are not those of now
            bucket.times_with.clear()
            bucket.times_without.clear()
        bucket.last_step = self._step
        if bucket.num_left:
            bucket.num_left -= 1
            if bucket.num_left and not self._is_hopeless(bucket):
                return
            self._end_trial(bucket, rows)
        self._use_best(bucket, rows)
        bucket.num_steps += 1
        if (
            bucket.num_steps > bucket.num_between
            and len(bucket.times(bucket.drafts)) >= LEAST_TIMES
        ):
            self._begin_trial(bucket, rows)

    def _begin_trial(self, bucket: _Bucket, rows: _Rows) -> None:
        bucket.num_left = rows.num_trial_steps(not bucket.drafts)
        bucket.times(not bucket.drafts).clear()
        if not bucket.drafts and not self._last_verified:
            self.acceptance.forget()

    def _is_hopeless(self, bucket: _Bucket) -> bool:
        """Whether a trial shows that drafts take longer than all of them could save."""
        is_known = not bucket.drafts and len(bucket.times_with) > 1
        return is_known and bucket.measured_cost() > 1 + self.num_drafts

    def _end_trial(self, bucket: _Bucket, rows: _Rows) -> None:
        """Learn what drafts cost, and when to try the other way again if it is no better."""
        bucket.num_left = bucket.num_steps = 0
        if bucket.times(not bucket.drafts):  # or else its steps have failed
            bucket.is_measured = True
            bucket.cost = bucket.measured_cost()
            bucket.num_between = self._num_between(bucket, rows) * 2**bucket.num_vain
            bucket.num_vain = min(bucket.num_vain + 1, MOST_DOUBLINGS)

    def _use_best(self, bucket: _Bucket, rows: _Rows) -> None:
        """Use the other way if it was measured and brings more tokens a second."""
        speed = self._gain(rows) / bucket.cost
        if bucket.is_measured and (1 / speed if bucket.drafts else speed) > MARGIN:
            bucket.drafts = not bucket.drafts
            bucket.num_steps = bucket.num_vain = 0
            bucket.num_between = self._num_between(bucket, rows)

    def _num_between(self, bucket: _Bucket, rows: _Rows) -> float:
        """The number of steps until a trial of the other way, so that what it is expected to lose
        is `SHARE` of them."""
        # In steps of the way in use: the time of a step of the trial, and the tokens it brings.
        cost, gain = bucket.cost, self._gain(rows)
        if bucket.drafts:
            cost, gain = 1 / cost, 1 / gain
        lost = max(0.0, cost - gain) * rows.num_trial_steps(not bucket.drafts)
        if bucket.drafts:  # the step after the trial has no drafts to verify
            lost += 1 - gain
        return max(LEAST_BETWEEN if bucket.is_measured else 0, lost / SHARE)

    def _gain(self, rows: _Rows) -> float:
        """The expected number of tokens of a step with drafts, over that of one without."""
        return 1 + rows.num_drafting * (self.acceptance.expected_run - 1) / rows.num

    # -- buckets -----------------------------------------------------------------------------------

    def _bucket(self, rows: _Rows) -> _Bucket:
        bucket = self._buckets.get(rows.bucket)
        if bucket is None:
            cost = 1 + min(self._beyond_nearest(rows.bucket), self.num_drafts)
            bucket = self._buckets[rows.bucket] = _Bucket(cost)
            bucket.num_between = self._num_between(bucket, rows)
        return bucket

    def _beyond_nearest(self, place: int) -> float:
        """What drafts add to the time of a step of a new bucket, of the time without drafts: it is
        taken to double with the rows, from what it is in the nearest bucket."""
        measured = [other for other, bucket in self._buckets.items() if bucket.is_measured]
        if not measured:
            return self.num_drafts * 2.0 ** (place - DEAR_ROWS)
        nearest = min(measured, key=lambda other: (abs(other - place), other))
        return (self._buckets[nearest].cost - 1) * 2.0 ** (place - nearest)
