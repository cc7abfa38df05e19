"""What ends steps, or the whole engine, before their time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from concurrent.futures import Future
from typing import Any

from minisgl.engine.delivery import Delivery
from minisgl.engine.page_moves import PageMoves
from minisgl.engine.startup import Loaded
from minisgl.engine.step_watch import FIRST_LIMIT_S, LOOK_S, StepWatch
from minisgl.errors import (
    EngineStoppedError,
    HostMemoryError,
    MinisglError,
    StepError,
    without_words,
)
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "The host ran out of memory while a step was planned; give the server more, or lower "
    "--max-running-requests and --max-queued-requests."
)
# Closing the engine waits no longer than this for a rank that has stopped sending heartbeats.
CLOSE_GRACE_S = 5.0


class Failures:
    """Steps that fail or hang, lost ranks, and the end of the engine by these. Used on its loop.

    A failed step ends its own requests and those of later steps; the engine goes on. After a fatal
    error (`failure`) it launches and settles nothing any more.
    """

    def __init__(
        self, loaded: Loaded[Any], scheduler: Scheduler, delivery: Delivery, moves: PageMoves
    ) -> None:
        self.failure: BaseException | None = None  # why the engine is dead
        self.ended = asyncio.Event()  # a step has, or the engine
        self._runner = loaded.runner
        self._ranks = loaded.ranks
        self._scheduler = scheduler
        self._delivery = delivery
        self._moves = moves
        self._loop = asyncio.get_running_loop()
        first_limit_s = math.inf if self._ranks is None else FIRST_LIMIT_S
        self.watch = StepWatch(loaded.config.step_timeout, first_limit_s=first_limit_s)
        self._looking: asyncio.TimerHandle | None = None
        self._hung: asyncio.Future[None] = self._loop.create_future()  # done: steps may hang
        if self._ranks is not None:
            self._ranks.lost.add_done_callback(self._on_lost)

    def step_failed(self, step: int, error: Exception) -> None:
        """Fail the requests of a step and of all later ones, or the engine where the error says
        that no other step will end."""
        if isinstance(error, EngineStoppedError):
            self.die(error)
            return
        if isinstance(error, MemoryError):
            error = HostMemoryError()
        elif not isinstance(error, StepError):
            error = StepError(f"Step {step} failed: {type(error).__name__}: {error}")
        logger.error("%s", error, exc_info=error.__cause__)
        for request in self._scheduler.fail(step, error):
            self._delivery.end(request)

    def die(self, error: Exception) -> None:
        """Handle a fatal error: fail every open request with it."""
        if self.failure is not None:
            return
        reason = error
        if isinstance(error, MinisglError):
            logger.critical("The engine has failed: %s", error, exc_info=error)
        else:
            logger.critical("The engine has failed: %s", without_words(error))
            reason = EngineStoppedError(
                OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
            )
        self.failure = reason
        self.ended.set()
        self._delivery.fail_all(reason)
        self._moves.close()

    # -- steps that hang, and lost ranks -----------------------------------------------------------

    def step_began(self, plan: StepPlan) -> None:
        self.watch.began(plan)
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Check on the steps in flight. Runs every second while there are any."""
        self._looking = None
        reason = self.watch.look(
            time.monotonic(),
            compiles=self._runner.may_compile(),
            silence=self._ranks.silence if self._ranks is not None else {},
        )
        if reason is not None and self._ranks is not None:
            self._ranks.give_up(EngineStoppedError(reason))
        elif reason is not None:
            self._on_hung(EngineStoppedError(reason))
        elif self.watch.in_flight and self.failure is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _on_lost(self, lost: Future[None]) -> None:
        """Handle the loss of a rank. Called by any thread."""
        reason = lost.exception()
        if isinstance(reason, Exception):
            with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
                self._loop.call_soon_threadsafe(self._on_hung, reason)

    def _on_hung(self, reason: Exception) -> None:
        self.die(reason)
        if not self._hung.done():
            self._hung.set_result(None)

    async def steps_end(self, collected: asyncio.Future[None]) -> None:
        """Wait until the launched steps are collected or known to hang."""
        ending = (collected, self._hung)
        while not any(future.done() for future in ending):
            await asyncio.wait(ending, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if self._ranks is not None:
                silent = [r for r, s in self._ranks.silence.items() if s > CLOSE_GRACE_S]
                if silent:
                    stopped = f"Rank {silent[0]} is silent, and does not end its last step."
                    self._ranks.give_up(EngineStoppedError(stopped))
