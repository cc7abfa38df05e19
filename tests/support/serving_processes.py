"""Servers as processes with a folder of their own for temporary files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.ports import free_port
from support.processes import PIPE_BYTES


@contextlib.contextmanager
def python_in(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, killed at the end; `folder` is that of its temporary files. If the test
    fails, its report has what the process has printed and nobody has read."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        pipesize=PIPE_BYTES,
    )
    failed = True
    try:
        yield process
        failed = False
    finally:
        process.kill()
        printed = process.communicate()[1]
        if failed:
            print(printed)


@contextlib.contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`minisgl serve` with the demo model: the process and its URL."""
    with free_port() as port:
        command = ("-m", "minisgl", "serve", "--port", str(port), *options)
        with python_in(folder, *command) as process:
            yield process, f"http://127.0.0.1:{port}"
