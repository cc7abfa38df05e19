"""How the router finds out whether a replica takes requests, and what it says of those that are
lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.router import fleet, replicas
from minisgl.router.config import CACHE, DECODE, PREFILL
from minisgl.router.exchange import HTTPRequest
from minisgl.router.fleet import FAILED, Fleet, Peer, probe
from minisgl.router.relay import Relay
from minisgl.server.process import new_event_loop

READY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Replica:
    """Answers when the test says so, on a thread: whatever the loop of the router does."""

    def __init__(self, path: str) -> None:
        self.asked, self.may_answer, self.answered = (threading.Event() for _ in range(3))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def answer(self) -> None:
        peer, _ = self.listener.accept()
        with peer:
            assert peer.recv(1000).startswith(b"GET /ready ")
            self.asked.set()
            self.may_answer.wait()
            with contextlib.suppress(BrokenPipeError):  # nobody waits any more
                peer.sendall(READY)
                self.answered.set()
                peer.recv(1)  # until the other end closes

    def close(self) -> None:
        self.may_answer.set()
        self.thread.join()
        self.listener.close()


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(fleet, "LOOK_S", 0.01)
    replica = Replica(str(tmp_path / "replica.sock"))
    yield replica
    replica.close()


def test_a_replica_that_has_answered_while_the_router_itself_was_late_is_not_silent(
    replica: Replica, tmp_path: Path
) -> None:
    async def probed() -> tuple[bool | None, str]:
        peer = Peer(0, str(tmp_path / "replica.sock"))
        probing = asyncio.ensure_future(probe(peer))
        while not replica.asked.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0)
        replica.may_answer.set()
        replica.answered.wait()
        time.sleep(2 * fleet.NUM_LOOKS * fleet.LOOK_S)  # noqa: ASYNC251 - the loop does not run
        found = await probing
        for upstream in peer.idle:
            upstream.abort()
        await asyncio.sleep(0)
        return found

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(probed()) == (True, "")


def test_one_that_answers_nothing_is_silent(replica: Replica, tmp_path: Path) -> None:
    async def probed() -> tuple[bool | None, str]:
        return await probe(Peer(0, str(tmp_path / "replica.sock")))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(probed()) == (None, "")
    assert replica.asked.is_set() and not replica.answered.is_set()


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_replica_that_falls_silent_is_said_once_and_not_at_the_end(
    stopping: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([None, True, None, None, True])  # the first while it starts
    has_ended = asyncio.Event()

    async def answer(peer: object) -> tuple[bool | None, str]:
        with contextlib.suppress(StopIteration):
            return next(answers), ""
        has_ended.set()
        return True, ""

    monkeypatch.setattr(replicas, "probe", answer)
    monkeypatch.setattr(replicas, "LOADING_POLL_S", 0)
    monkeypatch.setattr(replicas, "READY_POLL_S", 0)
    spec: Any = SimpleNamespace(index=3, server=SimpleNamespace(uds=""), close_s=0)
    supervisor = replicas.Supervisor([spec], (), lambda states: None)
    if stopping:
        await supervisor.stop(0)
    process: Any = None  # of which nothing is asked
    watching = asyncio.ensure_future(supervisor._watch(supervisor._all[0], process))
    await has_ended.wait()
    watching.cancel()
    assert caplog.text.count("Replica 3 does not answer") == (0 if stopping else 1)


async def test_a_prompt_that_its_replica_does_not_compute_is_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = str(tmp_path / "nowhere.sock")
    ways = Fleet([nowhere, nowhere], CACHE, [PREFILL, DECODE])
    request = HTTPRequest("POST", "/v1/completions", b"", [], b"{}")
    assert not await Relay(ways)._prefill(ways.replicas[0], request)
    assert "Replica 0 has not computed a prompt (EngineLostError)" in caplog.text
    assert ways.num_prefills == {FAILED: 1} and not ways.num_open
