"""The processes that route."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from minisgl.router import lifeline
from minisgl.router.config import CACHE
from minisgl.router.front import FrontProcesses, FrontSpec
from minisgl.server.config import ServerConfig


async def test_a_routing_process_that_is_started_while_all_end_ends_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = lifeline.start_child

    async def start_late(
        command: Sequence[str], environment: dict[str, str], pass_fds: Sequence[int]
    ) -> asyncio.subprocess.Process:
        started.append(await start(command, environment, pass_fds))
        await front.close()
        return started[0]

    monkeypatch.setattr(lifeline, "start_child", start_late)
    with socket.socket() as listener:
        spec = FrontSpec(
            index=0,
            server=ServerConfig(),
            policy=CACHE,
            replica_paths=("a",),
            listener_fd=listener.fileno(),
        )
        front = FrontProcesses([spec], ("cat", "-"))  # which does not end before its input
        await front.serve()
    assert [each.returncode for each in started] == [-9]
