"""The number of drafts that is chosen, on simulated devices: it is the fastest one, and finding it
costs little."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draft_policies import SameDrafts
from support.fake_runner import FakeRunner

from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import Request, SamplingParams
from minisgl.scheduler.run_lengths import ROWS_ASSUMED, Acceptance, RunChooser
from minisgl.scheduler.runs import Speculation
from minisgl.scheduler.scheduler import Scheduler

NUM_STEPS = 5000


def dense(num_tokens: int) -> float:
    """A dense model on a GPU: reading the weights takes as long as computing 150 tokens."""
    return 7.8 + 0.004 * num_tokens + 0.05 * max(0, num_tokens - 150)


def experts(num_tokens: int) -> float:
    """8 of 128 experts for each token: more tokens read more of them."""
    return 2.0 + 6.0 * (1 - (1 - 8 / 128) ** num_tokens) + 0.006 * num_tokens


def cpu(num_tokens: int) -> float:
    return 1.0 + num_tokens


CURVES = [dense, experts, cpu]
DRAFTING = 1.05  # times of a step, of the same one that drafts nothing


class Device:
    """Times and runs of steps that a chooser plans, each before the one before it has settled."""

    def __init__(
        self,
        curve: Callable[[int], float],
        acceptance: float,
        *,
        seed: int = 0,
    ) -> None:
        self.chooser = RunChooser(3)
        self.curve, self.acceptance = curve, acceptance
        self.seconds, self.num_tokens, self.chosen = 0.0, 0, list[int]()
        self.lengths: list[int] = []
        self._random, self._draw = random.Random(seed), np.random.default_rng(seed)
        self._in_flight: tuple[int, int, int, list[int], float | None] | None = None

    def step(self, num_rows: int, *, num_drafting: int | None = None, chunk: bool = False) -> None:
        drafting = num_rows if num_drafting is None else num_drafting
        num = self.chooser.choose(num_rows, drafting, is_timed=not chunk)
        if self._in_flight is not None:
            self.chooser.settled(*self._in_flight)
        has_drafts = bool(self.chosen and self.chosen[-1])
        self.lengths = self._runs(num_rows, drafting if has_drafts else 0, num)
        seconds = self.seconds_of(num_rows, num)
        # Two clocks never agree, and now and then the host has something else to do.
        seen = seconds * self._random.gauss(1, 0.01) * (3 if self._random.random() < 0.01 else 1)
        self._in_flight = num_rows, drafting, num, self.lengths, None if chunk else seen
        self.seconds += seconds
        self.num_tokens += sum(self.lengths)
        self.chosen.append(num)

    def _runs(self, num_rows: int, num_drafting: int, num_drafts: int) -> list[int]:
        """The length of the run of each row, in any order."""
        lengths: list[int] = []
        left = num_drafting
        for length in range(1, num_drafts + 1):
            longer = int(self._draw.binomial(left, self.acceptance))
            lengths += [length] * (left - longer)
            left = longer
        return lengths + [num_drafts + 1] * left + [1] * (num_rows - num_drafting)

    def seconds_of(self, num_rows: int, num_drafts: int) -> float:
        drafting = DRAFTING if num_drafts else 1.0
        return self.curve(num_rows * (1 + num_drafts)) * drafting

    def best_speed(self, num_rows: int) -> float:
        """Tokens a second with drafts, or without."""
        return max(
            num_rows
            * sum(self.acceptance**position for position in range(num + 1))
            / self.seconds_of(num_rows, num)
            for num in (0, 3)
        )

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds

    def measure(self, num_rows: int, num_steps: int) -> float:
        """The speed of so many more steps."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step(num_rows)
        return (self.num_tokens - tokens) / (self.seconds - seconds)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_the_fastest_number_of_drafts_is_found_and_finding_it_costs_little(
    curve: Callable[[int], float], acceptance: float, num_rows: int
) -> None:
    device = Device(curve, acceptance)
    without = num_rows / curve(num_rows)
    assert device.measure(num_rows, NUM_STEPS) > 0.99 * without
    # Where both are about as fast it does not matter which one is used.
    assert device.measure(num_rows, NUM_STEPS) > 0.98 * device.best_speed(num_rows)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7])
def test_a_batch_that_ends_loses_less_than_a_percent(
    curve: Callable[[int], float], acceptance: float
) -> None:
    """256 requests at once, whose ends leave fewer and fewer rows."""
    device = Device(curve, acceptance)
    lengths = [device._random.randint(100, 1024) for _ in range(256)]
    without = sum(curve(sum(length > step for length in lengths)) for step in range(max(lengths)))
    left = lengths
    while left:
        device.step(len(left))
        random.Random(len(left)).shuffle(left)
        left = [each - run for each, run in zip(left, device.lengths, strict=True) if each > run]
    assert device.seconds < 1.01 * without
    if acceptance > 0.5 and curve is not cpu:
        assert device.seconds < 0.95 * without  # the last rows profit


def test_text_that_becomes_easy_or_hard_is_noticed() -> None:
    device = Device(dense, 0.0)
    for acceptance, used in ((0.0, 0), (0.9, 3), (0.0, 0), (0.8, 3)):
        device.acceptance = acceptance
        device.measure(4, NUM_STEPS)
        assert device.chosen[-500:].count(used) > 400, f"acceptance {acceptance}"


def test_a_device_that_becomes_slow_with_more_tokens_is_noticed() -> None:
    device = Device(dense, 0.6)
    device.measure(8, NUM_STEPS)
    assert device.chosen[-500:].count(3) > 400
    device.curve = cpu
    device.measure(8, NUM_STEPS)
    assert device.chosen[-500:].count(0) > 400


@pytest.mark.parametrize("change", ["text", "device"])
def test_one_trial_is_enough_to_notice_a_change(change: str) -> None:
    num_rows = 1 if change == "text" else 8
    device = Device(experts, 0.0) if change == "text" else Device(cpu, 0.6)
    device.measure(num_rows, 8 * NUM_STEPS)
    device.curve, device.acceptance = (experts, 1.0) if change == "text" else (dense, 0.6)
    while not device.chosen[-1]:
        device.step(num_rows)
    device.measure(num_rows, 100)
    assert device.chosen[-100:] == [3] * 100


def test_a_trial_that_was_left_long_ago_begins_again() -> None:
    device = Device(dense, 0.7)
    while not (device.chosen and device.chosen[-1]):
        device.step(8)
    device.measure(1, 500)
    device.curve = lambda num_tokens: 10 * dense(num_tokens)  # contexts have grown
    device.measure(8, 50)
    assert device.chosen[-20:] == [3] * 20


def test_a_trial_that_cannot_pay_ends_at_once() -> None:
    device = Device(lambda num_tokens: num_tokens**2, 1.0)
    device.measure(1, 200)
    assert 0 < device.chosen.count(3) < 5


def test_numbers_of_rows_have_numbers_of_drafts_of_their_own() -> None:
    device = Device(dense, 0.7)
    for _ in range(20):
        device.measure(4, 300)
        device.measure(256, 300)
    assert device.chosen[-300:].count(0) > 280
    assert device.chosen[-600:-300].count(3) > 280


def test_rows_that_take_no_drafts_count_as_one_token() -> None:
    """What pays for all rows does not pay for a few of many."""
    device = Device(dense, 0.7)
    for _ in range(NUM_STEPS):
        device.step(64, num_drafting=64)
    assert device.chosen[-500:].count(3) > 400
    for _ in range(NUM_STEPS):
        device.step(64, num_drafting=8)
    assert device.chosen[-500:].count(0) > 400


def test_steps_with_prompts_are_neither_trials_nor_measured() -> None:
    device = Device(dense, 0.7)
    for _ in range(200):
        device.step(8, chunk=True)
    assert set(device.chosen) == {0}  # nothing was ever measured
    device.measure(8, 500)
    assert device.chosen[-1] == 3
    for _ in range(2000):
        device.step(8, chunk=True)
    assert set(device.chosen[-2000:]) == {3}


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 300),  # rows
            st.floats(0, 1),  # of which take drafts
            st.booleans(),  # a chunk
            st.floats(1e-6, 1e3),  # seconds
            st.booleans(),  # it fails, and is never settled
        ),
        max_size=120,
    ),
    num_drafts=st.integers(1, 8),
    repeats=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_any_history_leads_to_an_option_and_the_same_one_each_time(
    steps: list[tuple[int, float, bool, float, bool]], num_drafts: int, repeats: int, seed: int
) -> None:
    choosers = RunChooser(num_drafts), RunChooser(num_drafts)
    draw = random.Random(seed)
    for num_rows, part, chunk, seconds, fails in steps:
        drafting = round(num_rows * part)
        for _ in range(repeats):
            first, second = (
                each.choose(num_rows, drafting, is_timed=not chunk) for each in choosers
            )
            assert first == second
            assert first == 0 or (first == num_drafts and drafting)
            runs = [1 + draw.randint(0, first) * (row < drafting) for row in range(num_rows)]
            for chooser in () if fails else choosers:
                chooser.settled(num_rows, drafting, first, runs, None if chunk else seconds)
            assert 1 <= choosers[0].acceptance.expected_run <= 1 + num_drafts


# -- acceptance ------------------------------------------------------------------------------------


def test_acceptance_is_counted_by_position_of_rows_that_had_drafts() -> None:
    acceptance, first = Acceptance(3), Acceptance(1)
    # Of four rows with drafts, three accept the first, two of these the second, one the third; two
    # rows have none. A hundred times, so that what was assumed is forgotten.
    for _ in range(100):
        for each in (acceptance, first):
            each.add(4, [4, 3, 2, 1, 1, 1])
    assert first.expected_run == pytest.approx(1 + 3 / 4, abs=0.01)
    assert acceptance.expected_run == pytest.approx(1 + 3 / 4 + 2 / 4 + 1 / 4, abs=0.01)


def test_what_is_forgotten_weighs_as_much_as_a_few_rows() -> None:
    acceptance = Acceptance(1)
    for _ in range(100):
        acceptance.add(8, [1] * 8)
    acceptance.forget()
    acceptance.add(ROWS_ASSUMED, [2] * ROWS_ASSUMED)
    assert acceptance.expected_run == pytest.approx(1.5, abs=0.03)


# -- in the scheduler ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_requests", "longest"), [(2, 4), (3, 1)])
def test_a_step_of_more_rows_than_it_may_have_verifies_nothing(
    num_requests: int, longest: int
) -> None:
    speculation = Speculation(SameDrafts(3), max_rows=8)
    scheduler = Scheduler(
        kv=KVCacheManager(num_pages=40, page_size=2, cache_type="radix"),
        num_slots=4,
        max_seq_len=40,
        max_prefill_length=64,
        max_queued_requests=4,
        speculation=speculation,
    )
    runner = FakeRunner(page_size=2)
    params = SamplingParams(max_tokens=12)
    for index in range(num_requests):
        scheduler.submit(Request(str(index), [index, 1], params, max_tokens=12, seed=index))
    most: list[int] = []
    while (plan := scheduler.plan()) is not None:
        if len(plan.decode_slots) == num_requests:
            most.append(plan.max_run)
            assert speculation.counters.num_in_use == plan.max_run - 1
        scheduler.settle(runner.collect(runner.launch(plan)))
        scheduler.audit()
    assert most and {*most} == {longest}
