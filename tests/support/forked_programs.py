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
import struct
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import Any

from pexpect.fdpexpect import fdspawn
from support.forked_ranks import fork_server

from minisgl_cli.start import main

Program = Callable[[], int]


def minisgl(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    input: str = "",
) -> CompletedProcess[str]:
    """Run `minisgl ARGUMENTS` in the folder and capture what it prints.

    input: comes through a pipe, which has room for 64 KB.
    """
    command = [*map(str, arguments)]
    with ExitStack() as files:
        out, err = (files.enter_context(TemporaryFile()) for _ in range(2))
        read, write = os.pipe()
        with open(read, "rb") as piped, open(write, "wb") as to_pipe:
            to_pipe.write(input.encode())
            to_pipe.close()
            given = [piped.fileno(), out.fileno(), err.fileno()]
            process = prepared(main, command, environment or os.environ, folder, given)
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
        self._process = prepared(program, arguments, environment, None, files, session=True)
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
    session: bool = False,
    group: bool = False,
) -> ForkServerProcess:
    """A process that is to run the program. files: its input, output and error output.

    session: of its own, with the input as its terminal. group: a process group of its own.
    """
    inherited = [_Inherited(file) for file in files]
    where = folder or Path.cwd()
    given = (program, [*arguments], dict(environment), where, inherited, session, group)
    return fork_server().Process(target=_run, args=given)


def _run(
    program: Program,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    files: Sequence[_Inherited],
    session: bool,
    group: bool,
) -> None:
    if group:
        os.setpgid(0, 0)
    if session:
        os.setsid()
        fcntl.ioctl(files[0].number, termios.TIOCSCTTY, 0)
    for number, file in enumerate(files):
        os.dup2(file.number, number)
    for number in {file.number for file in files}:
        os.close(number)
    sys.stdin = os.fdopen(0, closefd=False)
    if session:  # a line at a time
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    gc.freeze()  # what is there already: a benchmark collects what it has not made
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["minisgl", *arguments]
    sys.exit(program())
