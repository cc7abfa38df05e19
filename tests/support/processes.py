"""The processes of a server: whether it runs, which there are, and that none is left."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from minisgl.ranks.processes.remote_ranks import RemoteRanks

PIPE_BYTES = 1 << 20  # of a pipe for a log that nobody reads until its process has ended


def pids_of(ranks: RemoteRanks) -> dict[int, int | None]:
    """The processes of the ranks, by rank."""
    return {rank: state.pid for rank, state in ranks._launcher.states().items()}


def check_running(process: subprocess.Popen[str]) -> None:
    """Fail, with what a process has printed and nobody has read, if it has ended."""
    if process.poll() is not None:
        printed = unread(process.stdout) + unread(process.stderr)
        pytest.fail(f"the process has ended with exit code {process.returncode}:\n{printed}")


def unread(pipe: IO[str] | None) -> str:
    """What is in a pipe, without waiting for more: children may have it open."""
    if pipe is None or not select.select([pipe], [], [], 0)[0]:
        return ""
    return os.read(pipe.fileno(), PIPE_BYTES).decode(errors="replace")


def children_of(folder: Path) -> dict[int, list[str]]:
    """The arguments of the processes that have `folder` for temporary files, by number. Forked ones
    run in it; instead of the arguments, which are those of what they are forked from, the words of
    their name."""
    wanted = f"TMPDIR={folder}".encode()
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == folder:
                found[int(place.name)] = (place / "comm").read_text().split()
            elif wanted in (place / "environ").read_bytes().split(b"\0"):
                arguments = (place / "cmdline").read_text().rstrip("\0").split("\0")
                found[int(place.name)] = arguments
    return found


def replica_sockets(folder: Path) -> list[str]:
    """The sockets of the replicas of a server with this folder for temporary files."""
    return sorted(map(str, folder.rglob("replica-*.sock")))


def wait_until_nothing_is_left(folder: Path) -> None:
    """Wait for the end of the processes with this folder, and of all files in it."""
    while children_of(folder) or [*folder.iterdir()]:
        time.sleep(0.02)


def wait_for_ready(process: subprocess.Popen[str], url: str, count: int) -> None:
    """Wait until so many replicas of a server are ready."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").json().get("ready", 0) == count:
                return
        check_running(process)
        time.sleep(0.02)
