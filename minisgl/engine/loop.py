"""The loop of steps: plan, launch, collect, settle, hand out.

A finished step is handled in one callback of the event loop: settle it, plan and launch the next
step, and only then hand out the tokens. Detokenization and delivery so overlap with the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import wait
from typing import Any

from minisgl.engine.delivery import Delivery
from minisgl.engine.failures import Failures
from minisgl.engine.masked_steps import MaskedSteps
from minisgl.engine.page_moves import PageMoves
from minisgl.engine.startup import Loaded
from minisgl.engine.stats import Meter
from minisgl.engine.waiting_thread import WaitingThread
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler


class StepLoop:
    """Keeps as many steps in flight as the device needs. Used on the engine's event loop."""

    def __init__(
        self, loaded: Loaded[Any], scheduler: Scheduler, delivery: Delivery, meter: Meter
    ) -> None:
        self._runner = loaded.runner
        self._scheduler = scheduler
        self._delivery = delivery
        self._meter = meter
        self.moves = PageMoves(loaded, scheduler, self.wake)
        self.failures = Failures(loaded, scheduler, delivery, self.moves)
        self._masks = MaskedSteps(loaded, scheduler, delivery, meter)
        # One step beyond those that run, one in each stage, is launched, so that the device never
        # waits for the loop.
        self._most_in_flight = loaded.config.pp + loaded.config.overlap
        self._max_in_flight = self._most_in_flight
        self._deferred: tuple[StepPlan, Any] | None = None  # launched, not sampled; and its handle
        self._loop = asyncio.get_running_loop()
        self._is_awake = False
        self._collector = WaitingThread("minisgl-collector", self._wait_for)

    def wake(self) -> None:
        """Launch steps in the loop's next iteration: requests submitted together share a step."""
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        self._is_awake = False
        try:
            self._launch_steps()
        except Exception as error:
            self.failures.die(error)

    def _launch_steps(self) -> None:
        """Launch what may be in flight; nothing follows a deferred plan before its sampling."""
        while (
            self.failures.failure is None
            and self._deferred is None
            and self._scheduler.num_in_flight < self._max_in_flight
        ):
            plan = self._scheduler.plan()
            self.moves.start()  # planning may have begun some; they do not depend on this plan
            if plan is None:
                return
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        if self._scheduler.num_in_flight == 1:
            self._meter.step_began(time.monotonic())
        try:
            masks = self._masks.filled(plan) if plan.parts and not plan.deferred else None
            handle = self._runner.launch(plan, masks)
        except Exception as error:
            self._fail(plan.step, error)
            return
        if plan.deferred:
            self._deferred = plan, handle
        else:
            self._collect(plan, handle)

    def _collect(self, plan: StepPlan, handle: Any) -> None:
        self._collector.add((plan.step, handle))
        self.moves.launched(plan, handle)
        self.failures.step_began(plan)

    def _wait_for(self, launched: tuple[int, Any]) -> None:
        """Wait for a launched step. Called by the collector's thread."""
        step, handle = launched
        try:
            outcome: StepResult | Exception = self._runner.collect(handle)
        except Exception as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
            self._loop.call_soon_threadsafe(self._on_step, step, outcome)

    def _on_step(self, step: int, outcome: StepResult | Exception) -> None:
        """Handle the end of a step or its failure. Called once for each step, in order."""
        self.failures.watch.ended()
        self.failures.ended.set()
        if self.failures.failure is not None or step != self._scheduler.next_to_settle:
            return  # nothing is settled any more, or an earlier step has failed
        try:
            if isinstance(outcome, Exception):
                self._fail(step, outcome)
                self._launch_steps()
            else:
                self._settle(outcome)
        except Exception as error:
            self.failures.die(error)

    def _settle(self, result: StepResult) -> None:
        now = time.monotonic()
        seconds = self._meter.step_ended(now, captured=result.captured)
        settled = self._scheduler.settle(result, seconds)
        if settled.launched.parts:
            self._masks.follow(settled.launched)
        if self._deferred is not None:
            self._sample(*self._deferred)
        self._launch_steps()
        self._delivery.hand_out(settled, now)

    def _sample(self, plan: StepPlan, handle: Any) -> None:
        """Let the rest of the deferred plan follow, if what it waits for is known."""
        if not self._scheduler.can_sample(plan):
            return
        self._deferred = None
        try:
            masks = self._masks.filled(plan)
            assert masks is not None, "only masks defer a plan"
            self._runner.sample(handle, masks)
        except Exception as error:
            self._fail(plan.step, error)
        else:
            self._collect(plan, handle)

    def _fail(self, step: int, error: Exception) -> None:
        self._deferred = None  # it is later than any step that may fail
        self.failures.step_failed(step, error)

    # -- pauses, and the end -----------------------------------------------------------------------

    async def pause(self) -> None:
        """Launch no other step, and wait until those that are launched have settled."""
        self._max_in_flight = 0
        await self._all_settle()

    def resume(self) -> None:
        self._max_in_flight = self._most_in_flight
        self.wake()

    async def store_all(self) -> None:
        """Write to disk what the other tiers hold, so that it outlives the engine. No other step
        follows."""
        await self.pause()
        plan = self._scheduler.plan_offload() if self.failures.failure is None else None
        if plan is not None:
            self._launch(plan)
            await self._all_settle()
        if self.failures.failure is None:
            await self.moves.store_all()

    async def _all_settle(self) -> None:
        while self._scheduler.num_in_flight and self.failures.failure is None:
            self.failures.ended.clear()
            await self.failures.ended.wait()

    async def end(self) -> bool:
        """Launch nothing any more, and wait until the launched steps have ended; False if they
        hang."""
        self._max_in_flight = 0
        self._deferred = None
        self.moves.close()
        self._end_threads()
        await self.failures.steps_end(asyncio.wrap_future(self._collector.ended))
        return self._collector.ended.done()

    def abandon(self, timeout_s: float) -> bool:
        """Do the same without the event loop, which has stopped. Blocks."""
        self._end_threads()
        return self._collector.ended in wait([self._collector.ended], timeout_s).done

    def _end_threads(self) -> None:
        self._collector.end()
        self.moves.end()
