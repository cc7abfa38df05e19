"""The processes that a server starts: which there are, and that none is left."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import httpx
import pytest


def children_of(folder: Path) -> dict[int, list[str]]:
    """The arguments of the processes that have `folder` for temporary files, by number."""
    wanted = f"TMPDIR={folder}".encode()
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                arguments = (place / "cmdline").read_text().rstrip("\0").split("\0")
                found[int(place.name)] = arguments
    return found


def replica_sockets(folder: Path) -> list[str]:
    """The sockets of the replicas of a server with this folder for temporary files."""
    return sorted(map(str, folder.rglob("replica-*.sock")))


def wait_until_nothing_is_left(folder: Path) -> None:
    """Wait for the end of the processes with this folder, and of all files in it."""
    deadline = time.monotonic() + 20
    while children_of(folder) or [*folder.iterdir()]:
        assert time.monotonic() < deadline, (children_of(folder), [*folder.rglob("*")])
        time.sleep(0.02)


def wait_for_ready(url: str, count: int) -> None:
    """Wait until so many replicas are ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").json().get("ready", 0) == count:
                return
        time.sleep(0.02)
    pytest.fail(f"never {count} replicas were ready")
