"""How many tokens the rows of a step draft: the number that brings the most tokens a second.

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
# A trial has so many steps, or more until so many rows have shown whether their drafts are right.
# Its first step verifies nothing if the steps before it drafted nothing.
TRIAL_STEPS, TRIAL_ROWS = 4, 12
# Each trial that changes nothing doubles the time to the next one, up to so many times.
MOST_DOUBLINGS = 3
# Of each option, the number of step times that are kept; a trial begins after so many.
NUM_TIMES, LEAST_TIMES = 8, 3
# How much better another number of drafts must be than the one in use.
MARGIN = 1.02
# Acceptance is that of the last rows, so many; before there are any, it is assumed as if of a few.
ROWS_REMEMBERED, ROWS_ASSUMED, ASSUMED_ACCEPTANCE = 128, 4, 0.6
# Before anything is measured, a draft for each of 2**8 rows is taken to double the time of a step.
DEAR_ROWS = 8


class Acceptance:
    """The part of the drafts that are accepted, by position in the run, of those whose predecessor
    was accepted. A draft that is missing, because the drafter found none, counts as rejected."""

    def __init__(self, most_drafts: int) -> None:
        self._verified = [float(ROWS_ASSUMED)] * most_drafts
        self._accepted = [ROWS_ASSUMED * ASSUMED_ACCEPTANCE] * most_drafts

    def add(self, num_rows: int, run_lengths: Sequence[int], num_drafts: int) -> None:
        """Record a step in which `num_rows` rows had up to `num_drafts` drafts each. run_lengths:
        of these rows, and of any others, which are 1."""
        lengths = Counter(run_lengths)
        verified = num_rows
        for position in range(num_drafts):
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

    def expected_run(self, num_drafts: int) -> float:
        """The expected number of tokens of a row with `num_drafts` drafts: 1 to num_drafts + 1."""
        run = reached = 1.0
        for position in range(num_drafts):
            reached *= self._accepted[position] / self._verified[position]
            run += reached
        return run


@dataclass(slots=True)
class _Option:
    """A number of drafts, for one bucket."""

    cost: float = 1.0  # how long a step takes, in a unit that the options of the bucket share
    times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))  # seconds
    is_measured: bool = False  # the cost is, not only estimated
    num_steps: int = 0  # since its last trial, or since it was last in use
    num_between: float = 0.0  # steps from then to its next trial
    num_vain: int = 0  # trials that have changed nothing, since it was last in use


@dataclass(slots=True)
class _Bucket:
    """What is known of steps whose numbers of rows have the same power of two above them."""

    options: dict[int, _Option]  # by their number of drafts
    best: int = 0  # in use
    tried: int | None = None  # under trial
    num_left: int = 0  # steps of the trial
    last_step: int = 0


class _Rows(NamedTuple):
    """The decode rows of a step."""

    num: int
    num_drafting: int  # of them, those that take drafts; at least 1

    @property
    def bucket(self) -> int:
        return (self.num - 1).bit_length()


class RunChooser:
    """Chooses the number of drafts of each step among a few, the options.

    Now and then an option that is not in use is tried for a few steps. Its cost is the ratio of the
    times of these steps to those just before them, so that contexts that grow do not change it. The
    tokens to expect follow from the acceptance of all rows. The more a trial has lost, the later
    the next one. What is chosen changes no token of any request.
    """

    def __init__(self, options: Sequence[int]) -> None:
        """options: numbers of drafts, with 0 among them."""
        self._numbers = tuple(sorted(options))
        assert self._numbers[0] == 0, "a step without drafts is always possible"
        self.acceptance = Acceptance(self._numbers[-1])
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
        if not is_timed:
            return bucket.best
        self._advance(bucket, rows)
        return bucket.best if bucket.tried is None else bucket.tried

    def settled(
        self,
        num_rows: int,
        num_drafting: int,
        num_drafts: int,
        run_lengths: Sequence[int],
        seconds: float | None,
    ) -> None:
        """Record a step that has ended, in the order of the plans. run_lengths: of its decode rows.
        seconds: the time that it took; None if it computed a prompt, too."""
        # If the step before drafted nothing there was nothing to accept, but of a drafter that
        # drafts in any step.
        if num_drafts and (self._last_verified or max(run_lengths, default=1) > 1):
            self.acceptance.add(num_drafting, run_lengths, num_drafts)
        self._last_verified = num_drafts
        if seconds is not None and num_drafting:
            option = self._bucket(_Rows(num_rows, num_drafting)).options[num_drafts]
            option.times.append(seconds)

    # -- trials ------------------------------------------------------------------------------------

    def _advance(self, bucket: _Bucket, rows: _Rows) -> None:
        """Count one more step: begin a trial, go on with it, or end it."""
        self._step += 1
        if self._step - bucket.last_step > LEAST_BETWEEN:
            bucket.tried = None  # the times of then are not those of now
            for option in bucket.options.values():
                option.times.clear()
        bucket.last_step = self._step
        if bucket.tried is not None:
            bucket.num_left -= 1
            if bucket.num_left and not _is_hopeless(bucket, bucket.tried):
                return
            self._end_trial(bucket, bucket.tried, rows)
        self._use_best(bucket, rows)
        for number, option in bucket.options.items():
            option.num_steps += 1
            is_due = number != bucket.best and option.num_steps > option.num_between
            if is_due and len(bucket.options[bucket.best].times) >= LEAST_TIMES:
                self._begin_trial(bucket, number, rows)
                return

    def _begin_trial(self, bucket: _Bucket, number: int, rows: _Rows) -> None:
        bucket.tried, bucket.num_left = number, _num_trial_steps(number, rows)
        bucket.options[number].times.clear()
        if number and not self._last_verified:
            self.acceptance.forget()

    def _end_trial(self, bucket: _Bucket, tried: int, rows: _Rows) -> None:
        """Learn what the option under trial costs, and when to try it again if it is no better."""
        option, best = bucket.options[tried], bucket.options[bucket.best]
        bucket.tried = None
        option.num_steps = 0
        if option.times:  # or else its steps have failed
            option.is_measured = True
            option.cost = best.cost * median(option.times) / median(best.times)
            option.num_between = self._num_between(bucket, tried, rows) * 2**option.num_vain
            option.num_vain = min(option.num_vain + 1, MOST_DOUBLINGS)

    def _use_best(self, bucket: _Bucket, rows: _Rows) -> None:
        """Use the option with the most tokens a second, of those that were measured."""
        number, most = bucket.best, MARGIN * self._speed(bucket, bucket.best, rows)
        for other, option in bucket.options.items():
            if option.is_measured and other != bucket.best:
                speed = self._speed(bucket, other, rows)
                if speed > most:
                    number, most = other, speed
        if number != bucket.best:
            former, bucket.best = bucket.best, number
            for each in (former, number):
                bucket.options[each].num_steps = bucket.options[each].num_vain = 0
            bucket.options[former].num_between = self._num_between(bucket, former, rows)

    def _num_between(self, bucket: _Bucket, number: int, rows: _Rows) -> float:
        """The number of steps until a trial of an option, so that what it is expected to lose is
        `SHARE` of them."""
        option, best = bucket.options[number], bucket.options[bucket.best]
        # In steps of the best option: the time of a step of the trial, and the tokens it brings.
        gained = self._tokens(number, rows) / self._tokens(bucket.best, rows)
        lost = max(0.0, option.cost / best.cost - gained) * _num_trial_steps(number, rows)
        if not number:  # the step after the trial has no drafts to verify
            lost += 1 - gained
        return max(LEAST_BETWEEN if option.is_measured else 0, lost / SHARE)

    def _speed(self, bucket: _Bucket, number: int, rows: _Rows) -> float:
        """The expected number of tokens in the unit of time of the costs."""
        return self._tokens(number, rows) / bucket.options[number].cost

    def _tokens(self, number: int, rows: _Rows) -> float:
        """The expected number of tokens of a step, with so many drafts of each row that takes
        any."""
        drafting = rows.num_drafting
        return rows.num - drafting + drafting * self.acceptance.expected_run(number)

    # -- buckets -----------------------------------------------------------------------------------

    def _bucket(self, rows: _Rows) -> _Bucket:
        bucket = self._buckets.get(rows.bucket)
        if bucket is None:
            bucket = self._buckets[rows.bucket] = self._new_bucket(rows)
        return bucket

    def _new_bucket(self, rows: _Rows) -> _Bucket:
        """A bucket that begins with an estimate of each cost: what a step with drafts takes beyond
        one without is taken to double with the rows, from what it is in the nearest bucket."""
        bucket = _Bucket({number: _Option(is_measured=not number) for number in self._numbers})
        beyond = self._beyond_nearest(rows.bucket)
        for number, option in bucket.options.items():
            option.cost = 1 + min(beyond[number], float(number))
        for number, option in bucket.options.items():
            option.num_between = self._num_between(bucket, number, rows)
        return bucket

    def _beyond_nearest(self, place: int) -> dict[int, float]:
        """By number of drafts, what they add to the time of a step of a bucket, of the time without
        drafts."""
        measured = [
            other
            for other, bucket in self._buckets.items()
            if all(option.is_measured for option in bucket.options.values())
        ]
        if not measured:
            return {number: number * 2.0 ** (place - DEAR_ROWS) for number in self._numbers}
        nearest = min(measured, key=lambda other: (abs(other - place), other))
        costs = {number: each.cost for number, each in self._buckets[nearest].options.items()}
        return {
            number: (cost / costs[0] - 1) * 2.0 ** (place - nearest)
            for number, cost in costs.items()
        }


def _is_hopeless(bucket: _Bucket, tried: int) -> bool:
    """Whether a trial shows that the option takes longer than all of its drafts could save."""
    times = bucket.options[tried].times
    cost = median(times) / median(bucket.options[bucket.best].times) if len(times) > 1 else 0.0
    return bucket.best == 0 and cost > tried + 1


def _num_trial_steps(number: int, rows: _Rows) -> int:
    if not number:
        return TRIAL_STEPS
    return max(TRIAL_STEPS, 1 + math.ceil(TRIAL_ROWS / rows.num_drafting))
