"""Processes that do untrusted work for this one, and what they have in common."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from struct import Struct
from typing import IO, NoReturn, Self

from minisgl.errors import EngineStoppedError, MinisglError

LENGTH = Struct("!Q")  # precedes every message
MEMORY_BYTES = 1 << 30  # that a task may allocate beyond what its idle process has
PIPE_BYTES = 1 << 20  # the largest that a user may ask for, if nothing else is set
TIME_IS_UP = (signal.SIGALRM, signal.SIGPROF)  # of the two timers


@dataclass(eq=False, repr=False)
class Worker:
    """A process that does one task at a time, started when first needed."""

    code: str  # what Python executes in the process, which ends with `serve_tasks`
    _: KW_ONLY
    does: str  # what the process does, for errors
    stopped: str  # the error of a task after `close`
    opening: bytes = b""  # a message that is sent before the first task, unless it is empty
    stderr: int | None = None

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closed = threading.Event()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it runs. Does not wait until it is ready.

        Raises EngineStoppedError after `close`.
        """
        if self._closed.is_set():
            raise EngineStoppedError(self.stopped)
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self.wait()
        self._ready = False
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {self.code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            process_group=0,  # Ctrl-C must not reach it; killed together with the one it forks
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        for pipe in (process.stdin, process.stdout):
            # Linux only; a user's pipes have a limit together.
            with contextlib.suppress(AttributeError, OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[arg-type]
        if self._closed.is_set():  # by another thread in the meantime
            self._signal(process, signal.SIGKILL)
        return process

    def ask(self, task: bytes) -> bytes:
        """Have a task done, and return the answer. Blocks; called by one thread at a time.

        Raises EngineStoppedError after `close`, MinisglError if the process has ended by itself.
        """
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        answer = None
        with contextlib.suppress(OSError, ValueError):  # a broken pipe
            if not self._ready:
                if self.opening:
                    send(process.stdin, self.opening)
                self._ready = receive(process.stdout) is not None
            send(process.stdin, task)
            answer = receive(process.stdout)
        if answer is not None:
            return answer
        code = self.wait()
        if self._closed.is_set():
            raise EngineStoppedError(self.stopped)
        raise MinisglError(f"The process that {self.does} ended with {code}.")

    def interrupt(self) -> None:
        """End the task under way as if its time were up. May be called by any thread."""
        if self._ready and (process := self._process) is not None:
            self._signal(process, signal.SIGALRM)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.wait()

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


def serve_tasks(
    tasks: IO[bytes],
    answers: IO[bytes],
    do: Callable[[bytes], bytes],
    ended: Callable[[int], bytes | None],
    timers: Mapping[int, float],
) -> NoReturn:
    """Run the process of a Worker, which has loaded what its tasks need, until its parent has gone.

    It forks the process that does them, and another one when that has been killed: to start one
    takes much longer. timers: the seconds after which a task is killed, by timer; 0: never. ended:
    makes the answer to a task that a signal, whose number it gets, has ended; None: this process
    ends in the same way.
    """
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # see Worker.interrupt
    try:
        # It is ready. No task is sent before, so that none has been read when it forks.
        send(answers, b"")
        while True:
            child = os.fork()
            if child == 0:
                _do_tasks(tasks, answers, do, timers)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answer = ended(-code) if code < 0 else None
            if answer is None:  # the parent has gone, or this is broken
                break
            send(answers, answer)
    except BrokenPipeError:
        code = 0
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)  # skip the flush of stdout at exit


def _do_tasks(
    tasks: IO[bytes],
    answers: IO[bytes],
    do: Callable[[bytes], bytes],
    timers: Mapping[int, float],
) -> NoReturn:
    """Do tasks, in the process that is killed when one takes too long."""
    code = 1
    try:
        while (task := receive(tasks)) is not None:
            # The default action of SIGALRM kills the process, whatever it executes. Between two
            # tasks it is ignored, so that each has one answer.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for timer, seconds in timers.items():
                signal.setitimer(timer, seconds)
            answer = do(task)
            for timer in timers:
                signal.setitimer(timer, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            send(answers, answer)
        code = 0
    except BrokenPipeError:
        code = 0
    finally:
        os._exit(code)


def _limit_memory() -> None:
    """Let this process allocate MEMORY_BYTES beyond what it has."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux; other limits remain
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + MEMORY_BYTES
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
