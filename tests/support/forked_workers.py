"""Processes of `minisgl.subprocesses.Worker` that are forked from one with what they import.

Hundreds of engines start some; a Python of its own takes up to a second to import what it needs.
Tests of what these processes do, and of how they end, have the fixture `started_workers`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import partial

from support.forked_programs import Running, prepared


class ForkedWorker(Running):
    """What `Worker` needs of a `subprocess.Popen` that executes code."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int | None,
        process_group: int,
        env: Mapping[str, str],
    ) -> None:
        pipe = subprocess.PIPE
        assert (command[1], stdin, stdout, process_group) == ("-c", pipe, pipe, 0)
        given, tasks = os.pipe()
        answers, taken = os.pipe()
        errors = os.open(os.devnull, os.O_WRONLY) if stderr == subprocess.DEVNULL else os.dup(2)
        files = [given, taken, errors]
        run = partial(_execute, command[2])
        lead = partial(os.setpgid, 0, 0)
        super().__init__(prepared(run, command[:1], env, None, files, lead=lead), files)
        self.stdin = os.fdopen(tasks, "wb")
        self.stdout = os.fdopen(answers, "rb")


def _execute(code: str) -> int:
    exec(code, {"__name__": "__main__"})
    return 0
