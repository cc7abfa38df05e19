"""Processes that do untrusted work for this one, and what they have in common."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from struct import Struct
from typing import IO

from minisgl.errors import EngineStoppedError

LENGTH = Struct("!Q")  # precedes every message


class Worker:
    """A process that does one task at a time, started when first needed."""

    def __init__(self, code: str, stopped: str, stderr: int | None = None) -> None:
        """code: what Python executes in the process; stopped: the error of a task after `close`."""
        self._code = code
        self._stopped = stopped
        self._stderr = stderr
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closed = threading.Event()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it runs. Does not wait until it is ready.

        Raises EngineStoppedError after `close`.
        """
        if self._closed.is_set():
            raise EngineStoppedError(self._stopped)
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self.wait()
        self._ready = False
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {self._code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            process_group=0,  # Ctrl-C must not reach it; killed together with the one it forks
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        if self._closed.is_set():  # by another thread in the meantime
            self._signal(process, signal.SIGKILL)
        return process

    def close(self) -> None:
        """End the process, whatever it is doing. May be called by any thread."""
        self._closed.set()
        if (process := self._process) is not None:
            self._signal(process, signal.SIGKILL)

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def wait(self) -> int | None:
        """Wait until the process has ended; returns its exit code, None if it was never started.

        Called by the thread that has tasks done, after `close` or when the process has ended by
        itself.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # unread tasks
                if pipe is not None:
                    pipe.close()
        return process.wait()


def send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """None where the other side has ended."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    message = pipe.read(length)
    return message if len(message) == length else None


def limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes beyond what it has."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux; other limits remain
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
