"""`minisgl serve --replicas` whose processes are forked from one with torch, which each would else
import anew.

They all run in the folder for their temporary files, by which `support.processes` finds them, and
replicas are called `replica` with their index. How they start and end is left to tests that start
them as users do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from support.forked_programs import Running, Session, prepared
from support.forked_ranks import forked_ranks, name_process
from support.ports import free_port

from minisgl_cli.serve import REPLICA
from minisgl_cli.start import main


@contextlib.contextmanager
def forked_demo(folder: Path, *options: str) -> Iterator[tuple[Session, str]]:
    """As `serving_processes.demo`."""
    with free_port() as port:
        environment = {**os.environ, "TMPDIR": str(folder)}
        arguments = ("serve", "--port", str(port), *options)
        process = Session(*arguments, environment=environment, program=run, folder=folder)
        failed = True
        try:
            yield process, f"http://127.0.0.1:{port}"
            failed = False
        finally:
            process.send_signal(signal.SIGKILL)
            printed, _ = process.communicate()
            if failed:
                print(printed)


def run() -> int:
    """Run `minisgl` so that the replicas and ranks that it starts are forked, too."""
    if sys.argv[1] == REPLICA:
        name_process(f"replica {sys.argv[-1]}")
    with forked_ranks(), mock.patch("minisgl.router.replicas.start_child", start_child):
        return main()


class Lifeline:
    """What is written to the standard input of a child."""

    def __init__(self, file: int) -> None:
        self._file = file

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._file, data)


class Child(Running):
    """What the router needs of an `asyncio.subprocess.Process`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        given, told = os.pipe()
        files = [given, os.dup(1), os.dup(2)]
        arguments = command[3:]  # behind `python -m minisgl`
        super().__init__(prepared(run, arguments, environment, None, files, lead=os.setsid), files)
        self.stdin = Lifeline(told)

    async def wait(self) -> int | None:  # type: ignore[override]
        return await asyncio.to_thread(super().wait)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def start_child(command: Sequence[str], environment: dict[str, str]) -> Child:
    return Child(command, environment)
