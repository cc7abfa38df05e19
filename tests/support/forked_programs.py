"""`minisgl` as a process that is forked from one with torch, which it would else import anew.

It has arguments, an environment, input, output, a terminal where one is asked for, and an exit code
of its own, as `python -m minisgl` has. How the interpreter starts the command is left to tests that
start it so.
"""

from __future__ import annotations

import fcntl
import gc
import os
import pty
import signal
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

from pexpect.fdpexpect import fdspawn
from support.forked_ranks import fork_server
from support.processes import PIPE_BYTES

from minisgl_cli.start import main

Program = Callable[[], object]  # returns its exit code, or raises SystemExit
START_S = 0.0005


def minisgl(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    input: str = "",
    program: Program = main,
) -> CompletedProcess[str]:
    """Run `minisgl ARGUMENTS` in the folder and capture what it prints.

    input: comes through a pipe, which has room for 64 KB. program: another one with arguments.
    """
    command = [*map(str, arguments)]
    with ExitStack() as files:
        out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        read, write = os.pipe()
        with open(read, "rb") as piped, open(write, "wb") as to_pipe:
            to_pipe.write(input.encode())
            to_pipe.close()
            given = [piped.fileno(), out.fileno(), err.fileno()]
            process = prepared(program, command, environment or os.environ, folder, given)
            process.start()
        process.join()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    assert process.exitcode is not None
    return CompletedProcess(command, process.exitcode, *printed)


class Terminal(fdspawn):  # type: ignore[misc]
    """A program in a terminal of its own. After `close`, `exitstatus` has its exit code."""

    def __init__(
        self,
        program: Program,
        *arguments: str,
        environment: Mapping[str, str],
        dimensions: tuple[int, int],
    ) -> None:
        """dimensions: rows and columns."""
        own, other = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", *dimensions, 0, 0))
        files = [other] * 3
        self._process = prepared(program, arguments, environment, None, files, lead=os.setsid)
        self._process.start()
        os.close(other)
        super().__init__(own, encoding="utf-8", codec_errors="replace", timeout=None)

    def close(self, force: bool = False) -> None:
        """Hang up, and wait until the program has ended. force: kill it."""
        super().close()
        if force:
            self._process.kill()
        self._process.join()
        self.exitstatus = self._process.exitcode


class Running:
    """A forked process that leads a group of its own, with what is used of a `subprocess.Popen`."""

    stdout: IO[Any] | None = None
    stderr: IO[Any] | None = None

    def __init__(self, process: ForkServerProcess, files: Sequence[int]) -> None:
        """files: are its own now, and closed here."""
        # Not by `start`, which would make it one of the `active_children` of this process.
        self._process = ForkServerProcess._Popen(process)
        self._lock = threading.Lock()
        self.pid: int = self._process.pid
        for file in set(files):
            os.close(file)
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:
                time.sleep(START_S)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        with self._lock:
            return self._process.poll()

    def wait(self) -> int | None:
        connection.wait([self._process.sentinel])
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Session(Running):
    """`minisgl ARGUMENTS` in a session of its own, whose output and errors are one."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        program: Program = main,
        folder: Path | None = None,
    ) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        said, told = os.pipe()
        fcntl.fcntl(told, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        given, files = environment or os.environ, [nothing, told, told]
        process = prepared(program, arguments, given, folder, files, lead=os.setsid)
        super().__init__(process, files)
        self.stdout, self.stderr = None, os.fdopen(said)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says, until it has ended. The limit is that of the test."""
        said = "" if self.stderr.closed else self.stderr.read()
        self.stderr.close()
        self.wait()
        return said, said


@contextmanager
def forked_session(*command: str, **environment: str) -> Iterator[Session]:
    """A process for `python COMMAND`, which is `-m minisgl ARGUMENTS`, in a session of its own."""
    assert command[:2] == ("-m", "minisgl")
    process = Session(*command[2:], environment={**os.environ, **environment})
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class _Inherited:
    """A file descriptor that comes to a forked process as another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.number),)


def _inherit(given: Any) -> _Inherited:
    return _Inherited(given.detach())


def prepared(
    program: Program,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None,
    files: Sequence[int],
    *,
    lead: Callable[[], object] | None = None,
) -> ForkServerProcess:
    """A process that is to run the program. files: its input, output and error output.

    lead: what makes it the leader of a group or a session. Its input may be a terminal, which the
    leader of a session then has for itself.
    """
    inherited = [_Inherited(file) for file in files]
    where = folder or Path.cwd()
    given = (program, [*arguments], dict(environment), where, inherited, lead)
    return fork_server().Process(target=_run, args=given)


def _run(
    program: Program,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    files: Sequence[_Inherited],
    lead: Callable[[], object] | None,
) -> None:
    if lead is not None:
        lead()
    if os.isatty(files[0].number):
        fcntl.ioctl(files[0].number, termios.TIOCSCTTY, 0)
    for number, file in enumerate(files):
        os.dup2(file.number, number)
    for number in {file.number for file in files}:
        os.close(number)
    coding = environment.get("PYTHONIOENCODING")
    sys.stdin = os.fdopen(0, encoding=coding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=coding, closefd=False)
    gc.freeze()  # what is there already: a benchmark collects what it has not made
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # is that of the environment
    os.chdir(folder)
    sys.argv = ["minisgl", *arguments]
    sys.exit(program())
