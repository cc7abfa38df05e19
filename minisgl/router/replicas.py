"""Starts the replicas, watches them, and starts those again that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from minisgl.config import EngineConfig
from minisgl.errors import MinisglError
from minisgl.keys import VARIABLE
from minisgl.kvcache.disk import STORE_S
from minisgl.router.fleet import Peer, ReplicaState, probe
from minisgl.router.lifeline import end_children, start_child, tell
from minisgl.router.placement import Share
from minisgl.server.config import ServerConfig

logger = logging.getLogger(__name__)

# Between the end of a replica and its next start; doubled each time, until one lasts.
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
LASTING_S = 60.0
# Between two looks at a replica: while it loads, and later.
LOADING_POLL_S = 0.1
READY_POLL_S = 1.0
# A replica that answers no probe for this long is killed. Engines judge their own steps sooner.
SILENCE_LIMIT_S = 120.0
# For a replica to end after its requests have, and what it writes to a disk cache.
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What the process of a replica is told."""

    index: int
    engine: EngineConfig
    server: ServerConfig
    share: Share
    role: str = ""  # where replicas divide the work
    pages_path: str = ""  # of the socket at which it exchanges KV pages

    @property
    def close_s(self) -> float:
        """For the replica to end after its requests have."""
        return CLOSE_S + (STORE_S if self.engine.disk_cache else 0.0)


class ReplicaStartError(MinisglError):
    """A replica ended before it was ready for the first time; it has said why."""

    def __init__(self, index: int, exit_code: int) -> None:
        ended = f"ended with exit code {exit_code}"
        if exit_code < 0:
            ended = f"was killed by {signal.Signals(-exit_code).name}"
        super().__init__(f"Replica {index} {ended} before it was ready.")
        self.exit_code = exit_code if exit_code > 0 else 1


@dataclass(slots=True, eq=False)
class _Running:
    """One replica over all its starts."""

    spec: ReplicaSpec
    peer: Peer  # for probes
    process: asyncio.subprocess.Process | None = None
    was_ready: bool = False
    ready_since_s: float | None = None
    is_silent: bool = False
    refusal: str = ""
    num_starts: int = 0

    @property
    def state(self) -> ReplicaState:
        return ReplicaState(
            is_ready=self.ready_since_s is not None,
            start=self.num_starts,
            is_silent=self.is_silent,
            refusal=self.refusal,
        )


class Supervisor:
    """Keeps one process for each spec running."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        command: Sequence[str],
        report: Callable[[Sequence[ReplicaState]], None],
        prepare: Callable[[int], Awaitable[bool]] | None = None,
    ) -> None:
        """command: starts a replica, which reads its spec from the lifeline; its index follows.

        report: called whenever the state of a replica changes. prepare: what is done at each start
        before a replica counts as ready, by its index, again until it returns True.
        """
        self._all = [_Running(spec, Peer(spec.index, spec.server.uds)) for spec in specs]
        self._command = command
        self._report = report
        self._prepare = prepare
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop`; raises ReplicaStartError."""
        await asyncio.gather(*map(self._keep, self._all))

    async def stop(self, seconds: float) -> None:
        """Let the replicas finish their requests for so long, and end all of them."""
        self._stopping.set()
        processes = [running.process for running in self._all if running.process is not None]
        await end_children(processes, seconds + max(each.spec.close_s for each in self._all))

    def states(self) -> list[ReplicaState]:
        return [running.state for running in self._all]

    async def _keep(self, running: _Running) -> None:
        """Start a replica again and again."""
        delay_s = FIRST_DELAY_S
        while not self._stopping.is_set():
            exit_code, lasted_s = await self._run_once(running)
            if self._stopping.is_set():
                return
            if not running.was_ready:
                raise ReplicaStartError(running.spec.index, exit_code)
            if lasted_s >= LASTING_S:
                delay_s = FIRST_DELAY_S
            logger.error(
                "Replica %d has ended (exit code %d); starting it again in %g s",
                running.spec.index,
                exit_code,
                delay_s,
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _run_once(self, running: _Running) -> tuple[int, float]:
        """Run the process of a replica to its end: its exit code, and how long it was ready."""
        spec = running.spec
        # Progress in lines: bars of several processes would overwrite each other.
        environment = {**os.environ, **spec.share.environment(), "TTY_COMPATIBLE": "0"}
        environment.pop(VARIABLE, None)  # the spec has all keys
        command = (*self._command, str(spec.index))
        process = running.process = await start_child(command, environment)
        if self._stopping.is_set():  # while it was started
            process.kill()
        running.num_starts += 1
        self._report(self.states())
        tell(process, spec)
        watching = asyncio.ensure_future(self._watch(running, process))
        try:
            exit_code = await process.wait()
        finally:
            watching.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        since_s, running.ready_since_s = running.ready_since_s, None
        running.is_silent, running.refusal = False, ""
        self._report(self.states())
        return exit_code, 0.0 if since_s is None else time.monotonic() - since_s

    async def _watch(self, running: _Running, process: asyncio.subprocess.Process) -> None:
        """Follow whether a replica takes requests; kill it if it is silent."""
        heard_s, prepare = time.monotonic(), self._prepare
        while True:
            is_ready, refusal = await probe(running.peer)
            if (is_ready or refusal) and prepare is not None:
                if await prepare(running.spec.index):
                    prepare = None
                is_ready, refusal = await probe(running.peer)
                is_ready = is_ready and prepare is None
            now, before = time.monotonic(), running.state
            running.is_silent, running.refusal = running.was_ready and is_ready is None, refusal
            if is_ready is not None:
                heard_s = now
            elif running.was_ready and now - heard_s > SILENCE_LIMIT_S:
                logger.error(
                    "Replica %d has not answered for %.0f s", running.spec.index, now - heard_s
                )
                process.kill()
                return
            if bool(is_ready) != (running.ready_since_s is not None):
                running.ready_since_s = now if is_ready else None
                running.was_ready = True
            if running.is_silent and not before.is_silent and not self._stopping.is_set():
                logger.warning(
                    "Replica %d does not answer; it gets no requests until it does",
                    running.spec.index,
                )
            if running.state != before:
                self._report(self.states())
            await asyncio.sleep(READY_POLL_S if is_ready else LOADING_POLL_S)
