"""The engine's statistics against a count by hand."""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_loop import ScriptedRunner, deltas_of, engine_on, params
from support.parity import case_of, complete, greedy, load_engine
from support.waiting import until

from minisgl.engine import AsyncEngine
from minisgl.engine.stats import REQUEST_BOUNDS, STEP_BOUNDS, EngineStats, Histogram, Meter
from minisgl.errors import StepError
from minisgl.matcher import MaskRows
from minisgl.request import FinishReason, Request, SamplingParams
from minisgl.scheduler.plan import StepPlan, StepResult

BOUNDS = (0.5, 1.0, 4.0)
NUM_REQUESTS = 5


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.6, 1.0, 4.0, 4.1, 99.0]), st.integers(0, 3)))
)
def test_a_histogram_counts_values_up_to_each_bound(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    values = [value for value, times in observed for _ in range(times)]
    for index, bound in enumerate((*BOUNDS, math.inf)):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@pytest.mark.parametrize("bounds", [STEP_BOUNDS, REQUEST_BOUNDS])
def test_histogram_bounds_range_from_a_millisecond_to_minutes(bounds: Sequence[float]) -> None:
    assert bounds[0] == 0.001
    assert bounds[-1] >= 60
    assert list(bounds) == sorted(set(bounds))


def request(index: int) -> Request:
    made = Request(str(index), [1], SamplingParams(), max_tokens=99, seed=0)
    made.submitted_s = 0.0
    return made


# Who gets how many tokens in each step. A request that is left out for a while was retracted.
@given(
    st.lists(
        st.dictionaries(st.integers(0, NUM_REQUESTS - 1), st.one_of(st.just(1), st.integers(1, 4))),
        max_size=20,
    )
)
def test_inter_token_times_are_recorded_for_every_token(
    steps: list[dict[int, int]],
) -> None:
    meter = Meter()
    requests = [request(index) for index in range(NUM_REQUESTS)]
    last: dict[int, float] = {}
    firsts, gaps = [], []
    for step, members in enumerate(steps, start=1):
        now = step * step * 0.25  # each gap tells which steps it lies between
        meter.tokens_came([requests[index] for index in members], [*members.values()], now)
        for index, count in members.items():
            if index in last:
                gaps += [(now - last[index]) / count] * count  # they share the time
            else:
                firsts.append(now)
                gaps += [0.0] * (count - 1)
            last[index] = now
    for histogram, values in ((meter.totals.ttft_s, firsts), (meter.totals.itl_s, gaps)):
        expected = [0] * len(histogram.counts)
        for value in values:
            expected[bisect_left(histogram.bounds, value)] += 1
        assert histogram.counts == expected
        assert histogram.sum == pytest.approx(sum(values))
    assert meter.totals.num_output_tokens == len(firsts) + len(gaps)


def test_step_time_begins_at_the_previous_steps_end_or_at_the_launch() -> None:
    meter = Meter()
    meter.step_began(10.0)
    meter.step_ended(10.5, captured=True)  # the next one was launched already
    meter.step_ended(10.75, captured=False)
    meter.step_began(20.0)  # after a pause
    meter.step_ended(21.0, captured=True)
    assert meter.totals.step_s.sum == pytest.approx(0.5 + 0.25 + 1.0)
    assert meter.totals.step_s.count == 3
    assert meter.totals.num_graph_steps == 2


@pytest.mark.parametrize("overlap", [True, False])
async def test_the_engine_measures_every_token_and_every_ending(overlap: bool) -> None:
    runner = ScriptedRunner(page_size=4)
    async with engine_on(runner, overlap=overlap, max_running_requests=3) as engine:
        streams = [engine.submit([i, 1, 2], params(10, ignore_eos=True)) for i in range(8)]
        streams[6].abort()  # still waiting
        await asyncio.gather(*map(deltas_of, streams))
        stopped = engine.submit([3], params(10, stop_token_ids=range(50), min_tokens=2))
        assert (await deltas_of(stopped))[-1].finish_reason is FinishReason.STOP
        runner.fail_at = frozenset({runner.launched[-1].step + 1})
        with pytest.raises(StepError):
            await deltas_of(engine.submit([9], params(ignore_eos=True)))
        # A step that was launched before the failed one may still be on its way.
        await until(lambda: not engine._scheduler.num_in_flight)
        totals, counters = engine.stats().totals, engine.stats().counters
    num_tokens = 7 * 10 + stopped.request.num_output_tokens
    assert totals.num_output_tokens == num_tokens
    assert totals.num_finished == {
        FinishReason.LENGTH: 7,
        FinishReason.STOP: 1,
        FinishReason.ABORT: 1,
        FinishReason.ERROR: 1,
    }
    assert totals.ttft_s.count == totals.e2e_s.count == 8
    assert totals.itl_s.count == num_tokens - 8
    assert totals.step_s.count == counters.num_steps - 1  # the failed one has no time
    assert totals.num_graph_steps == 0
    for done in (*streams[:6], streams[7], stopped):
        times = done.request
        assert times.first_token_s is not None and times.last_token_s is not None
        assert times.submitted_s <= times.first_token_s <= times.last_token_s
    # What a request took is its first token and the gaps after it, whoever sums it up.
    spans = sum(
        done.request.last_token_s - done.request.submitted_s
        for done in (*streams[:6], streams[7], stopped)
    )
    assert totals.ttft_s.sum + totals.itl_s.sum == pytest.approx(spans)
    assert totals.e2e_s.sum >= spans


def test_the_phases_of_a_request_are_between_its_times() -> None:
    meter = Meter()

    def end(reason: FinishReason, admitted: float | None, *tokens: float) -> None:
        ended = request(0)
        ended.finish_reason, ended.admitted_s = reason, admitted
        if tokens:
            ended.first_token_s, ended.last_token_s = tokens[0], tokens[-1]
            ended.token_ids += [1] * len(tokens)
        meter.request_ended(ended, 100.0)

    end(FinishReason.STOP, 1.0, 3.0, 5.0, 9.0)
    end(FinishReason.LENGTH, 2.0, 6.0)
    end(FinishReason.LENGTH, 4.0)  # it wanted no tokens
    end(FinishReason.ABORT, 8.0, 9.0, 10.0)
    end(FinishReason.ERROR, None)  # it has never run
    totals = meter.totals
    assert (totals.queue_s.count, totals.queue_s.sum) == (5, 1 + 2 + 4 + 8 + 100)
    assert (totals.prefill_s.count, totals.prefill_s.sum) == (3, 2 + 4 + 96)
    assert (totals.decode_s.count, totals.decode_s.sum) == (2, 6 + 0)
    assert (totals.prompt_lengths.count, totals.prompt_lengths.sum) == (3, 3)
    assert (totals.answer_lengths.count, totals.answer_lengths.sum) == (3, 3 + 1 + 0)


async def test_a_request_waits_in_the_queue_until_it_has_a_slot() -> None:
    async with engine_on(ScriptedRunner(page_size=4), max_running_requests=1) as engine:
        streams = [engine.submit([i, 1, 2], params(5, ignore_eos=True)) for i in range(3)]
        await asyncio.gather(*map(deltas_of, streams))
        waited = engine.stats().totals.queue_s
    times = [stream.request for stream in streams]
    assert waited.sum == pytest.approx(sum(each.admitted_s - each.submitted_s for each in times))
    for before, each in pairwise(times):
        assert before.last_token_s <= each.admitted_s <= each.first_token_s


async def of_retracted() -> tuple[list[Request], EngineStats]:
    """Six requests of 60 tokens, of which some went back to the queue."""
    async with engine_on(
        ScriptedRunner(page_size=4), num_pages=20, schedule_conservativeness=0.1
    ) as engine:
        streams = [engine.submit([i, 1, 2], params(60, ignore_eos=True)) for i in range(6)]
        await asyncio.gather(*map(deltas_of, streams))
        stats = engine.stats()
    assert stats.counters.num_retractions > 0
    return [stream.request for stream in streams], stats


async def test_a_retraction_does_not_count_as_the_queue_again() -> None:
    requests, stats = await of_retracted()
    assert stats.totals.queue_s.count == 6
    assert max(each.admitted_s for each in requests) <= min(each.first_token_s for each in requests)


async def test_inter_token_times_include_those_around_a_retraction() -> None:
    requests, stats = await of_retracted()
    assert stats.totals.ttft_s.count == 6
    assert stats.totals.itl_s.count == 6 * 59
    spans = sum(each.last_token_s - each.submitted_s for each in requests)
    assert stats.totals.ttft_s.sum + stats.totals.itl_s.sum == pytest.approx(spans)


class CapturedRunner(ScriptedRunner):
    """Says that its steps without chunks ran as graphs."""

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> StepResult:
        result = super().launch(plan, masks)
        return replace(result, captured=not plan.chunks)


async def test_steps_replayed_as_graphs_are_counted() -> None:
    runner = CapturedRunner(page_size=4)
    async with engine_on(runner) as engine:
        await deltas_of(engine.submit([1, 2], params(10, ignore_eos=True)))
        totals = engine.stats().totals
    assert totals.num_graph_steps == sum(not plan.chunks for plan in runner.launched) == 9


@pytest.mark.parametrize("padded", [0, 2])
def test_a_runner_reports_whether_it_replayed_a_graph(padded: int) -> None:
    async def run() -> EngineStats:
        engine = AsyncEngine(load_engine(case_of("llama3").folder, padded=padded))
        async with engine:
            await complete(engine, [1, 2, 3], greedy(6))
            return engine.stats()

    totals = asyncio.run(run()).totals
    assert totals.num_graph_steps == (totals.step_s.count if padded else 0)


async def test_a_stats_snapshot_does_not_change_later() -> None:
    async with engine_on(ScriptedRunner(page_size=4)) as engine:
        before = engine.stats()
        await deltas_of(engine.submit([1], params(5, ignore_eos=True)))
        assert before.totals.num_output_tokens == before.totals.step_s.count == 0
        assert before.totals.num_finished[FinishReason.LENGTH] == 0
        assert engine.stats().totals.num_output_tokens == 5


async def test_each_finished_request_has_a_log_line_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine_on(ScriptedRunner(page_size=4)) as engine:
        with caplog.at_level(logging.DEBUG, "minisgl"):
            await deltas_of(engine.submit([1] * 9, params(5, ignore_eos=True), request_id="first"))
            engine.submit([1], params(), request_id="second").abort()
        with caplog.at_level(logging.INFO, "minisgl"):
            await deltas_of(engine.submit([1], params(5, ignore_eos=True), request_id="third"))
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("request first: length after ")
    assert "9 prompt tokens (0 cached), 5 output tokens from " in first
    assert second.startswith("request second: abort after ")
    assert second.endswith("1 prompt tokens (0 cached), 0 output tokens")


def test_importing_the_engine_imports_neither_prometheus_client_nor_transformers() -> None:
    """So that a token can cost no call into the first, and ranks do not wait a second for the
    other. The stats, and the server with them, start without torch."""
    check = (
        "import sys, minisgl.engine.stats; assert 'torch' not in sys.modules;"
        "import minisgl.engine.engine;"
        "assert not {'prometheus_client', 'transformers'} & {*sys.modules}"
    )
    served = "import sys, minisgl.server.app; assert 'torch' not in sys.modules"
    for code in (check, served):
        subprocess.run([sys.executable, "-c", code], check=True)
