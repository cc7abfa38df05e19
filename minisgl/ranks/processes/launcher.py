"""Starts ranks and ends them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess

from minisgl.ranks.processes.channel import RankEnd, Waitable
from minisgl.ranks.processes.worker import RankSpec, run_rank

_PR_SET_PDEATHSIG = 1  # of prctl(2)
RANK_NAME = "minisgl-rank-"  # of a process, before its rank
UNGUARDED = 78  # exit code of a rank that would start ranks itself
UNGUARDED_REASON = (
    "the process of each rank imports your script again, and would start ranks itself; "
    'put what the script does under `if __name__ == "__main__":`'
)
# Ctrl-C, a supervisor's SIGTERM and the end of a terminal reach all processes; rank 0 decides when
# the ranks end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a rank's process."""

    pid: int | None  # None before it is started
    exit_code: int | None  # as in subprocess: -N after signal N; None while it runs


class Launcher:
    """Runs ranks as processes on this machine, one GPU each."""

    def __init__(self, context: SpawnContext) -> None:
        self._context = context
        self._processes: dict[int, SpawnProcess] = {}
        # The system tells the end of a process once. A thread that asks while another one has just
        # been told would learn that it runs.
        self._asking = threading.Lock()

    def start(self, specs: Sequence[RankSpec], ends: Sequence[RankEnd]) -> None:
        """Start one rank for each spec, with its end of the channel. Called once.

        The calling thread must stay alive: ranks are killed when it ends.
        """
        # The new processes inherit blocked signals, and keep them blocked until they ignore them.
        # Starting the first process would start the resource tracker, which unblocks them.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        self._processes = {
            spec.rank: self._context.Process(
                target=run_spawned_rank,
                args=(spec, end, os.getpid()),
                name=f"{RANK_NAME}{spec.rank}",
                daemon=True,
            )
            for spec, end in zip(specs, ends, strict=True)
        }
        for process in self._processes.values():
            process.start()

    def states(self) -> Mapping[int, ProcessState]:
        """The process of each rank of this machine; empty before `start`."""
        with self._asking:
            return {
                rank: ProcessState(process.pid, process.exitcode)
                for rank, process in self._processes.items()
            }

    def wakers(self) -> Sequence[Waitable]:
        """Objects that become ready when a process ends."""
        return [process.sentinel for process in self._processes.values()]

    def join(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, up to `timeout_s` in total."""
        deadline = time.monotonic() + timeout_s
        for process in self._started():
            self._join(process, max(0.0, deadline - time.monotonic()))

    def kill(self, timeout_s: float) -> None:
        """Kill every running rank and wait for its end, up to `timeout_s` each."""
        with self._asking:
            for process in self._started():
                process.kill()
        for process in self._started():
            self._join(process, timeout_s)

    def _started(self) -> list[SpawnProcess]:
        return [process for process in self._processes.values() if process.pid is not None]

    def _join(self, process: SpawnProcess, timeout_s: float) -> None:
        """Wait for the end of a process without keeping others from asking."""
        if wait([process.sentinel], timeout_s):
            with self._asking:
                process.join()


def spawn_obstacle() -> str | None:
    """The reason why this process cannot spawn ranks; None if it can.

    Does not return in a rank that imports the script which has started it: the process that waits
    for the rank says why.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.startswith(RANK_NAME):
            os._exit(UNGUARDED)
        return UNGUARDED_REASON
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        return (
            "the process of each rank imports your script again, and cannot read it from standard "
            "input; put it into a file"
        )
    return None


def run_spawned_rank(spec: RankSpec, end: RankEnd, parent_pid: int) -> None:
    """The main function of a spawned process, which ends with the thread that has started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call above
        os._exit(1)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    run_rank(spec, end)
