"""Processes of `minisgl.subprocesses.Worker` that are forked from one with what they import.

Hundreds of engines start some; a Python of its own takes up to a second to import what it needs.
Tests of what these processes do, and of how they end, have the fixture `started_workers`.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from support.forked_programs import prepared

START_S = 0.0005


class ForkedWorker:
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
        assert (command[1], stdin, stdout, process_group) == ("-c", -1, -1, 0)
        given, tasks = os.pipe()
        answers, taken = os.pipe()
        errors = os.open(os.devnull, os.O_WRONLY) if stderr == subprocess.DEVNULL else os.dup(2)
        files = [given, taken, errors]
        process = prepared(partial(_execute, command[2]), command[:1], env, None, files, group=True)
        # Not by `start`, which would make it one of the `active_children` of this process.
        self._process = ForkServerProcess._Popen(process)
        for file in files:
            os.close(file)
        self._lock = threading.Lock()
        self.pid = self._process.pid
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:  # as that of a Popen from the start
                time.sleep(START_S)
        self.stdin = os.fdopen(tasks, "wb")
        self.stdout = os.fdopen(answers, "rb")

    def poll(self) -> int | None:
        with self._lock:
            return self._process.poll()

    def wait(self) -> int | None:
        connection.wait([self._process.sentinel])
        return self.poll()


def _execute(code: str) -> int:
    exec(code, {"__name__": "__main__"})
    return 0
