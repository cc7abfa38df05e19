"""`minisgl serve` as a process, with the demo model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.http_server import free_port


@contextlib.contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL; `folder` is that of its temporary files."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", "--port", str(port), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()
