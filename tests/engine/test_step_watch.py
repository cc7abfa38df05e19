"""Detection of steps that take too long, and how it is reported."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping

import httpx
import pytest
from support.gated_runner import asking, gated_server
from support.waiting import until

from minisgl.config import EngineConfig
from minisgl.engine.step_watch import StepWatch
from minisgl.errors import ConfigError, EngineStoppedError
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import Chunk, StepPlan

DECODE = (0, 1, 2)


class Clock:
    """Looks every second at a watch with a timeout of 30."""

    def __init__(self, watch: StepWatch) -> None:
        self.watch = watch
        self.now = 1000.0
        self.step = 0

    def run(self, plan: StepPlan, seconds: int) -> None:
        """A step that ends in time."""
        self.watch.began(plan)
        assert self.look(seconds) is None
        self.watch.ended()

    def look(
        self,
        seconds: int,
        *,
        compiles: bool = False,
        silence: Mapping[int, float] | None = None,
        apart: float = 1.0,
    ) -> str | None:
        for _ in range(seconds):
            self.now += apart
            given_up = self.watch.look(self.now, compiles=compiles, silence=silence or {})
            if given_up is not None:
                return given_up
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock(StepWatch(30.0, first_limit_s=300.0))


def decode(step: int, *, longest: int = 100) -> StepPlan:
    return StepPlan(step, DECODE, longest)


def prefill(step: int, num_tokens: int) -> StepPlan:
    return StepPlan(step, (), chunks=(Chunk(0, 0, range(num_tokens), samples=True),))


def test_a_step_is_late_after_a_third_of_the_timeout_and_fails_after_all_of_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock.run(decode(1), 0)
    clock.watch.began(decode(2))
    assert clock.look(11) is None and clock.watch.stalled is None  # the first look begins at 0
    assert clock.look(1) is None
    assert clock.watch.stalled == "Step 2 has run for 11 s, unlike others of its size."
    assert clock.look(100) == "Step 2 has not ended within 31 s."
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_late_step_that_ends_is_logged_and_not_stalled(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock.run(decode(1), 0)
    clock.run(decode(2), 20)
    assert clock.watch.stalled is None and not clock.watch.in_flight
    assert caplog.messages[-1] == "Step 2 has ended after all, in 19 s"


def test_a_step_longer_than_any_before_it_gets_the_long_timeout(clock: Clock) -> None:
    """An example is a first prefill, which compiles kernels or is slow on a CPU."""
    clock.run(decode(1), 0)
    clock.run(prefill(2, 1000), 200)
    clock.run(prefill(3, 600), 400)  # much the same size
    clock.run(decode(4, longest=40_000), 200)
    clock.watch.began(prefill(5, 8000))
    assert clock.look(1000) == "Step 5 has not ended within 301 s."


def test_a_step_that_compiles_may_take_long_and_is_not_remembered(clock: Clock) -> None:
    clock.run(decode(1), 0)
    clock.watch.began(decode(2))
    assert clock.look(200, compiles=True) is None and clock.watch.stalled is None
    clock.watch.ended()
    clock.watch.began(decode(3))
    assert clock.look(100) == "Step 3 has not ended within 31 s."


def test_a_launch_that_blocks_the_host_beyond_the_timeout_fails(clock: Clock) -> None:
    """Launching blocks if a GPU hangs with many steps queued."""
    clock.run(decode(1), 0)
    clock.watch.began(decode(2))
    assert clock.look(1000, compiles=True) == "Step 2 has not ended within 331 s."


def test_a_rank_without_heartbeats_is_named_whatever_the_step(clock: Clock) -> None:
    clock.watch.began(prefill(1, 1000))
    assert clock.look(12, compiles=True, silence={1: 0.5, 2: 50.0}) is None
    assert clock.watch.stalled is not None
    assert clock.watch.stalled.endswith("; rank 2 is silent.")
    reason = clock.look(100, compiles=True, silence={1: 0.5, 2: 50.0})
    assert reason == "Step 1 has not ended within 31 s; rank 2 is silent."


def test_time_during_which_the_process_was_stopped_does_not_count(clock: Clock) -> None:
    clock.run(decode(1), 0)
    clock.watch.began(decode(2))
    assert clock.look(5, apart=3600.0) is None and clock.watch.stalled is None


def test_with_an_infinite_timeout_no_step_is_late() -> None:
    clock = Clock(StepWatch(math.inf))
    clock.run(decode(1), 0)
    clock.run(decode(2), 10_000)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_timeout_must_be_above_zero(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--step-timeout .*: allowed: a number above 0"):
        EngineConfig(step_timeout=seconds)


# -- an engine ------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Fast(StepWatch):
    """Time flies."""

    def look(self, now: float, *, compiles: bool, silence: Mapping[int, float]) -> str | None:
        return super().look(100 * now, compiles=compiles, silence=silence)


class Hurried(Fast):
    """Time flies until a step is late, and then stands still."""

    def look(self, now: float, *, compiles: bool, silence: Mapping[int, float]) -> str | None:
        if self.stalled is not None:
            return None
        return super().look(now, compiles=compiles, silence=silence)


async def test_health_reports_a_late_step_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.engine.failures.LOOK_S", 0.02)
    async with (
        gated_server(step_timeout=180.0) as gated,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}") as client,
    ):
        monkeypatch.setattr(gated.engine._steps.failures, "watch", Hurried(180.0))
        body = asking([1, 2, 3], 4, stream=False)
        headers = {"content-type": "application/json"}
        first = await client.post("/v1/completions", content=body, headers=headers)
        gated.runner.close_gate()
        waiting = asyncio.ensure_future(
            client.post("/v1/completions", content=body, headers=headers)
        )
        await until(lambda: gated.engine.stalled)
        answer = await client.get("/health")
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "stalled" and "has run for" in error["message"]
        gated.runner.open()
        assert (await waiting).json()["choices"] == first.json()["choices"]
        assert (await client.get("/health")).status_code == 200


async def test_an_engine_whose_step_does_not_end_fails_and_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.engine.failures.LOOK_S", 0.02)
    async with gated_server(step_timeout=180.0) as gated:
        engine = gated.engine
        async for _ in engine.submit([1, 2, 3], PARAMS):
            pass
        monkeypatch.setattr(engine._steps.failures, "watch", Fast(180.0, first_limit_s=180.0))
        gated.runner.close_gate()
        num_launched = len(gated.runner.launched)
        stream = engine.submit([1, 2, 3], PARAMS)
        await until(lambda: len(gated.runner.launched) > num_launched)
        pausing = asyncio.ensure_future(engine.weights.pause())
        with pytest.raises(EngineStoppedError, match=r"Step \d+ has not ended within"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStoppedError, match="has failed"):
            await asyncio.wait_for(pausing, 10)
        assert isinstance(engine.failure, EngineStoppedError)
        await engine.close()
        assert gated.runner.num_collected < len(gated.runner.launched)
        gated.runner.open()
