"""Several ranks behind the methods of one: rank 0 here, the others in processes of their own.

    this process                                   rank 1, 2, ...
    launch(plan) ── bytes of the plan ───────────▶ launch(plan)
    collect(handle): the tokens of rank 0          (the same tokens, which nobody reads)

What fails in a step of several ranks is fatal for all: one that is not there leaves the others in a
collective that never ends, which on a GPU nothing can interrupt. So a thread here starts the other
ranks and watches them, and a rank's end fails everybody who waits, whatever their threads hang in.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minisgl.config import ResolvedConfig
from minisgl.distributed.communicator import Communicator
from minisgl.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    EngineStoppedError,
    MinisglError,
)
from minisgl.models.config import ModelConfig
from minisgl.runner.load import Report
from minisgl.runner.parallel.plan_codec import PlanEncoder
from minisgl.runner.parallel.worker import (
    CLOSE,
    HEARTBEAT_S,
    Failed,
    RankSpec,
    Ready,
    join_and_load,
    run_rank,
)
from minisgl.runner.runner import ModelRunner, StepHandle
from minisgl.scheduler.plan import StepPlan, StepResult

# A process that runs is never silent for so long, whatever it does.
SILENCE_LIMIT_S = 120.0
# Whoever notices first that something is wrong gives the cause so long to be found.
VERDICT_S = 1.0
# For an orderly end of the ranks, after which they are killed.
CLOSE_LIMIT_S = 10.0
LEAVE_AFTER_S = 5.0

_LOAD_ERRORS = {kind.__name__: kind for kind in (CheckpointError, DeviceMemoryError)}


def load_ranks(
    config: ResolvedConfig, model_config: ModelConfig, folder: Path, report: Report | None = None
) -> TensorParallelRunner:
    """Start config.tp ranks and load a part of the model on each.

    Blocks, for seconds or minutes. Raises ConfigError where no ranks can be started,
    CheckpointError, DeviceMemoryError, or EngineStoppedError if a rank dies meanwhile.
    """
    if reason := _obstacle():
        raise ConfigError("--tp", config.tp, reason)
    report = report or (lambda phase, share: None)
    try:
        meeting = Path(tempfile.mkdtemp(prefix="minisgl-ranks-"))
    except OSError as obstacle:
        reason = f"the ranks meet through a temporary file, and none can be made: {obstacle}"
        raise ConfigError("--tp", config.tp, reason) from obstacle
    spec = RankSpec(0, config, model_config, folder, meeting, os.getpid())
    processes = RankProcesses(spec)
    own: tuple[ModelRunner, Communicator] | None = None
    try:
        # In a thread that can be left behind, if it waits for a rank that has died.
        loading = _in_thread(lambda: join_and_load(spec, report))
        either: list[Future[Any]] = [loading, processes.lost]
        wait_for_futures(either, return_when=FIRST_COMPLETED)
        if not loading.done():
            processes.lost.result()
        error = loading.exception()
        if isinstance(error, CheckpointError):  # which all ranks find
            raise error
        if isinstance(error, Exception):
            raise processes.lose(error)
        own = loading.result()
        processes.wait_ready(lambda share: report("waiting for the other ranks", share))
        if not processes.on_gpu:
            processes.forget()
    except BaseException:
        processes.kill()
        if not processes.on_gpu:
            for part in own or ():
                part.close()
            processes.forget()
        raise
    return TensorParallelRunner(*own, processes)


def _obstacle() -> str | None:
    """Why no ranks can be started from here, if so."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return (
            "the process of each rank imports your script again, and would start ranks itself; "
            'put what the script does under `if __name__ == "__main__":`'
        )
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        return (
            "the process of each rank imports your script again, and cannot read it from standard "
            "input; put it into a file"
        )
    if dist.is_initialized():
        return (
            "this process has ranks already, of another engine or of your own; "
            "close that engine, or use another process"
        )
    return None


def _in_thread(
    work: Callable[[], tuple[ModelRunner, Communicator]],
) -> Future[tuple[ModelRunner, Communicator]]:
    future: Future[tuple[ModelRunner, Communicator]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="minisgl-load", daemon=True).start()
    return future


class TensorParallelRunner:
    """As ModelRunner, which it has for rank 0, but any failure is an EngineStoppedError.

    `lost` raises it too, as soon as it is known, even while `collect` hangs. If a GPU was used, the
    process ends a few seconds later.
    """

    def __init__(self, own: ModelRunner, ranks: Communicator, processes: RankProcesses) -> None:
        self.capacity = own.capacity
        self.processes = processes
        self._own = own
        self._ranks = ranks
        self._encoder = PlanEncoder()
        # Were the others killed while a step runs here, that step would not end, nor this process.
        atexit.register(self.close)

    @property
    def lost(self) -> Future[None]:
        return self.processes.lost

    def silence(self) -> Mapping[int, float]:
        """Seconds since the last sign of life of each rank but 0, which gives one a second."""
        return self.processes.silence

    def give_up(self, reason: MinisglError) -> None:
        """Kill the other ranks and fail with `reason`. Returns at once; any thread may call it."""
        threading.Thread(
            target=self.processes.fail, args=(reason,), name="minisgl-kill", daemon=True
        ).start()

    def launch(self, plan: StepPlan) -> StepHandle:
        self.processes.num_launched += 1
        self.processes.send(self._encoder.encode(plan))
        return self._own.launch(plan)

    def may_compile(self) -> bool:
        return self._own.may_compile()

    def collect(self, handle: StepHandle) -> StepResult:
        try:
            return self._own.collect(handle)
        except Exception as error:
            raise self.processes.lose(error) from error
        finally:
            self.processes.num_collected += 1

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.lost.done() and self.processes.on_gpu:
            return  # what is launched may never end
        # On a GPU this rank cannot leave the others before they do their part.
        late = EngineStoppedError(f"The ranks have not ended within {CLOSE_LIMIT_S:g} s.")
        killing = threading.Timer(CLOSE_LIMIT_S, self.processes.fail, (late,))
        killing.daemon = True
        killing.start()
        self.processes.begin_to_end()
        self._own.close()
        self._ranks.close()
        killing.cancel()
        self.processes.end()
        self.processes.forget()


class RankProcesses:
    """Ranks 1 to n - 1: started, watched and ended by one thread.

    They are killed when that thread ends, which it does with this process at the latest.
    """

    def __init__(self, own: RankSpec) -> None:
        """Returns at once. own: rank 0's."""
        self.lost: Future[None] = Future()  # raises why the ranks are of no use any more
        self.silence = dict.fromkeys(range(1, own.config.tp), 0.0)  # seconds without sign of life
        self.num_launched = self.num_collected = 0  # steps
        self.on_gpu = own.config.device == "cuda"
        self._step_timeout_s = own.config.step_timeout
        self._meeting = own.meeting
        others = range(1, own.config.tp)
        context = torch.multiprocessing.get_context("spawn")
        self._heartbeats = context.RawArray("d", own.config.tp)
        pipes = {rank: context.Pipe() for rank in others}
        self._connections = {rank: here for rank, (here, _) in pipes.items()}
        self._far_ends = [there for _, there in pipes.values()]
        self._processes = {
            rank: context.Process(
                target=run_rank,
                args=(replace(own, rank=rank), there, self._heartbeats),
                name=f"minisgl-rank-{rank}",
                daemon=True,
            )
            for rank, (_, there) in pipes.items()
        }
        self._ready: set[int] = set()
        self._failed: dict[int, Failed] = {}
        self._hung_up: set[int] = set()  # their connection is closed, which only their end does
        self._changed = threading.Condition()  # _ready, or lost
        self._ending = False
        self._gone = threading.Event()
        self._looked_s = 0.0
        self._heard = [0.0] * own.config.tp  # the heartbeats at that time
        self._waited_s = 0.0  # for the step in flight at that time
        self._waits_for = 0
        self._sending = threading.Lock()
        # multiprocessing's own way would be SIGTERM, which they ignore, and to wait for them.
        atexit.register(self.kill)
        threading.Thread(target=self._watch, name="minisgl-ranks", daemon=True).start()

    @property
    def pids(self) -> dict[int, int | None]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def wait_ready(self, report: Callable[[float], None]) -> None:
        """Blocks until all are loaded. Raises why that will not be."""
        with self._changed:
            while len(self._ready) < len(self._processes) and not self.lost.done():
                report(len(self._ready) / len(self._processes))
                self._changed.wait()
        if self.lost.done():
            self.lost.result()

    def send(self, data: bytes) -> None:
        """To all. Who reads there does little else, so this does not block."""
        with self._sending:
            if self._ending and not self.lost.done():
                raise EngineStoppedError("The ranks have been told to end.")
            try:
                for connection in self._connections.values():
                    connection.send_bytes(data)
            except OSError as error:
                raise self.lose(EngineStoppedError("A rank cannot be reached.")) from error

    def lose(self, error: Exception) -> Exception:
        """Give up because of what happened here, if it is not because a rank has died, which may be
        noticed here first. Returns the reason."""
        wait_for_futures((self.lost,), VERDICT_S)
        kind = _LOAD_ERRORS.get(type(error).__name__, EngineStoppedError)
        self.fail(kind(f"Rank 0 failed: {error}"))
        reason = self.lost.exception()
        assert isinstance(reason, Exception)
        return reason

    def begin_to_end(self) -> None:
        """From here on they may, and `send` is refused."""
        with self._sending:
            self._ending = True
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # it has ended already
                    connection.send_bytes(CLOSE)

    def end(self) -> None:
        """Wait until all have ended, for a while."""
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        atexit.unregister(self.kill)

    def kill(self) -> None:
        self._ending = True
        for process in self._processes.values():
            if process.pid is not None:
                process.kill()
        for process in self._processes.values():
            if process.pid is not None:
                process.join(CLOSE_LIMIT_S)
        self._gone.set()

    def forget(self) -> None:
        """Delete the file through which the ranks have met. NCCL, which looks at it again and
        again, hangs if it goes before the group is closed or the process ends."""
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _watch(self) -> None:
        # A signal that is blocked here is so in the processes, too, until they can ignore it; but
        # to start the tracker, which the first process would do, unblocks them.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for process in self._processes.values():
                process.start()
            for end in self._far_ends:
                end.close()
            self._looked_s = time.monotonic()
            heard = dict(self._connections)
            sentinels = [process.sentinel for process in self._processes.values()]
            while not self._ending:
                said = wait([*heard.values(), *sentinels], HEARTBEAT_S)
                for rank in [rank for rank, connection in heard.items() if connection in said]:
                    if not self._hear(rank):
                        del heard[rank]
                        self._hung_up.add(rank)
                self._count_silence()
                if self._reason() is not None and not self._ending:
                    # Those that lost the connection to a dead rank may be the first to say so.
                    time.sleep(VERDICT_S / 4)
                    self.fail(self._reason() or EngineStoppedError("A rank has failed."))
            self._gone.wait()  # they would be killed with this thread, in the middle of their end
        except Exception as error:
            self.fail(EngineStoppedError(f"The ranks cannot be started or watched: {error}"))

    def _hear(self, rank: int) -> bool:
        """Whether it may say more."""
        try:
            message = self._connections[rank].recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failed):
            self._failed[rank] = message
        elif isinstance(message, Ready):
            with self._changed:
                self._ready.add(rank)
                self._changed.notify_all()
        return True

    def _count_silence(self) -> None:
        """A look that comes late counts for little: this process may have been stopped itself."""
        now = time.monotonic()
        elapsed, self._looked_s = min(now - self._looked_s, 2 * HEARTBEAT_S), now
        for rank in self.silence:
            last, self._heard[rank] = self._heard[rank], self._heartbeats[rank]
            self.silence[rank] = self.silence[rank] + elapsed if last == self._heard[rank] else 0.0
        step = self.num_collected + 1
        same = step == self._waits_for and self.num_launched >= step
        self._waits_for, self._waited_s = step, self._waited_s + elapsed if same else 0.0

    def _reason(self) -> MinisglError | None:
        """Why the ranks are of no use any more, if they are not."""
        for rank, process in self._processes.items():
            ended = process.exitcode is not None or rank in self._hung_up
            if ended and rank not in self._failed:
                return EngineStoppedError(
                    f"Rank {rank} (process {process.pid}) {_end_of(process.exitcode)}."
                )
        for rank, failed in self._failed.items():
            kind = _LOAD_ERRORS.get(failed.kind, EngineStoppedError)
            return kind(f"Rank {rank} failed: {failed.message}")
        for rank, silence in self.silence.items():
            if silence > SILENCE_LIMIT_S or min(silence, self._waited_s) > self._step_timeout_s:
                return EngineStoppedError(
                    f"Rank {rank} (process {self.pids[rank]}) has given no sign of life for "
                    f"{silence:.0f} s."
                )
        return None

    def fail(self, reason: Exception) -> None:
        """Kill the ranks, and let everybody know who waits. Blocks until they are dead."""
        with self._changed:
            if self.lost.done():
                return
            self.lost.set_exception(reason)
            self._changed.notify_all()
        self.kill()
        if self.on_gpu:
            # A kernel here may wait for the dead for ever, and an orderly exit for that kernel. So
            # whoever waits is told, and then this process ends too.
            leaving = threading.Timer(LEAVE_AFTER_S, self._leave)
            leaving.daemon = True
            leaving.start()
            atexit.register(self._leave)

    def _leave(self) -> None:
        self.forget()
        os._exit(1)


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "is ending"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}; it may have printed why"
