"""What a router does for a replica that starts after the others have got other weights."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.router import replicas
from minisgl.router import training as module
from minisgl.router.adapters import ReplicaRefusedError
from minisgl.router.exchange import HTTPRequest
from minisgl.router.fleet import ReplicaState
from minisgl.router.training import (
    FROM_DISK,
    FROM_GROUP,
    RENAME,
    TRANSFERRED,
    FleetTraining,
)

DROPPED = ["/sleep?level=2", "/wake_up"]
NAMED = "/finish_weight_update?name=7"  # with a body that has one for the weights


class Started:
    """A replica that notes what it is asked for."""

    index = 0

    def __init__(self, status: int = 200, fails: str = "", code: str = "") -> None:
        """status: of answers to what begins with `fails`. code: why it takes no requests then."""
        self.status, self.fails, self.code = status, fails, code
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.state = ReplicaState(is_ready=True)

    async def whole(self, sent: bytes) -> tuple[int, bytes]:
        self.asked.append(path := sent.decode().split()[1])
        self.bodies.append(sent.partition(b"\r\n\r\n")[2])
        return self.status if path.startswith(self.fails) else 200, b"{}"

    async def get(self, path: str) -> tuple[int, bytes]:
        assert path == "/ready"
        return 503 if self.code else 200, b'{"error": {"code": "%s"}}' % self.code.encode()


def asked_of(target: str) -> HTTPRequest:
    path, _, query = target.partition("?")
    body = b'{"weight_version": "7"}' if target == NAMED else b"{}"
    return HTTPRequest("POST", path, query.encode(), [], body, raw_path=path.encode())


async def training_of(replica: Started, targets: tuple[str, ...]) -> FleetTraining:
    """Of a fleet of which these have been asked."""
    fleet = SimpleNamespace(replicas=[replica])
    training = FleetTraining(fleet, "admin", 1)  # type: ignore[arg-type]
    for target in targets:
        if replica.status == 200:
            await training._ask(asked_of(target))
        else:
            with pytest.raises(ReplicaRefusedError):
                await training._ask(asked_of(target))
    return training


def start(training: FleetTraining, replica: Started) -> Started:
    training._fleet.replicas = [replica]  # type: ignore[list-item]
    return replica


@pytest.mark.parametrize(
    ("updates", "status", "brought"),
    [
        ((), 200, []),
        ((FROM_DISK,), 400, []),
        ((FROM_DISK,), 200, [FROM_DISK]),
        ((FROM_DISK, FROM_GROUP), 200, DROPPED),
    ],
)
async def test_a_replica_that_starts_later_gets_the_weights_or_waits_for_them(
    updates: tuple[str, ...], status: int, brought: list[str]
) -> None:
    training = await training_of(Started(status), updates)
    later = start(training, Started())
    assert await training.bring(0)
    assert later.asked == brought
    if brought == [FROM_DISK]:
        without = start(training, Started(400, FROM_DISK))
        assert await training.bring(0)
        assert without.asked == [FROM_DISK, *DROPPED]


@pytest.mark.parametrize("code", ["weights_incomplete", "dead"])
async def test_it_waits_for_weights_if_those_of_all_others_are_incomplete(code: str) -> None:
    training = await training_of(Started(400, code=code), (FROM_GROUP,))
    later = start(training, Started())
    assert await training.bring(0)
    assert later.asked == DROPPED


@pytest.mark.parametrize(
    ("asked", "brought"),
    [
        (("/sleep",), ["/sleep"]),
        (("/sleep", "/wake_up?tags=weights"), ["/sleep", "/wake_up?tags=weights"]),
        (("/sleep", "/wake_up"), []),
        (("/sleep", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"), []),
        (("/sleep", "/wake_up?tags=weights&tags=kv_cache"), []),
        (("/sleep?level=2",), [*DROPPED, "/sleep"]),
        (("/sleep?level=2", "/wake_up"), DROPPED),
        (("/sleep?level=2", "/wake_up?tags=weights", FROM_DISK, "/wake_up"), [FROM_DISK]),
        (("/pause?mode=abort",), ["/pause?mode=abort"]),
        (("/pause", "/continue_generation"), []),
        (
            ("/pause_generation", "/start_weight_update"),
            ["/pause_generation", "/start_weight_update"],
        ),
        (("/pause_generation", "/start_weight_update", "/resume"), ["/start_weight_update"]),
        (("/start_weight_update", FROM_DISK), [FROM_DISK, "/start_weight_update"]),
        (("/start_weight_update", FROM_DISK, "/finish_weight_update"), [FROM_DISK]),
        (("/start_weight_update", FROM_DISK, NAMED), [FROM_DISK, NAMED]),
        ((FROM_DISK, NAMED, "/start_weight_update"), [FROM_DISK, NAMED, "/start_weight_update"]),
        ((FROM_DISK, NAMED, FROM_DISK), [FROM_DISK]),
        (("/sleep", RENAME), [RENAME, "/sleep"]),
    ],
    ids=str,
)
async def test_it_is_kept_from_answering_as_the_others_are(
    asked: tuple[str, ...], brought: list[str]
) -> None:
    training = await training_of(Started(), asked)
    later = start(training, Started())
    assert await training.bring(0)
    assert later.asked == brought


@pytest.mark.parametrize("path", [FROM_DISK, FROM_GROUP, TRANSFERRED])
async def test_the_weights_of_all_replicas_have_one_name(path: str) -> None:
    fleet = SimpleNamespace(replicas=[Started(), Started()])
    training = FleetTraining(fleet, "admin", 1)  # type: ignore[arg-type]
    for body in (b"{}", b'{"weight_version": null}', b'{"weight_version": "7"}', b"[", b"3"):
        await training._ask(replace(asked_of(path), body=body))
    found = [each.bodies for each in fleet.replicas]
    first, second, given, *broken = found[0]
    assert found[0] == found[1] and first != second
    names = [json.loads(each)["weight_version"] for each in (first, second, given)]
    assert all(names) and names[2] == "7" and broken == [b"[", b"3"]
    later = start(training, Started())
    await training._ask(replace(asked_of(path), body=b"{}"))
    expected, later.bodies = later.bodies, []
    assert await training.bring(0)
    assert later.bodies == expected if path == FROM_DISK else later.asked[-2:] == DROPPED


@pytest.mark.parametrize("path", ["/sleep?level=2", "/wake_up", "/pause"])
async def test_it_takes_no_requests_before_it_has_done_all(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0)
    training = await training_of(Started(), (FROM_GROUP, "/pause"))
    later = start(training, Started(503, path))
    assert not await training.bring(0)
    assert later.asked[-1] == path and path.partition("?")[0] in caplog.text
    later.status = 200
    assert await training.bring(0)
    assert later.asked[-3:] == [*DROPPED, "/pause"]


@pytest.mark.parametrize("refusal", ["", "asleep"])
async def test_a_replica_is_brought_again_before_it_counts_as_ready(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """refusal: why it takes no requests when it was brought in part."""
    seen: list[bool] = []

    async def probe(peer: object) -> tuple[bool, str]:
        return (False, refusal) if refusal and len(seen) == 1 else (True, "")

    async def bring(index: int) -> bool:
        seen.append(supervisor.states()[index].is_ready)
        return len(seen) == 3

    monkeypatch.setattr(replicas, "probe", probe)
    monkeypatch.setattr(replicas, "LOADING_POLL_S", 0)
    is_ready = asyncio.Event()

    def report(states: Any) -> None:
        if states[0].is_ready:
            is_ready.set()

    spec: Any = SimpleNamespace(index=0, server=SimpleNamespace(uds=""))
    supervisor = replicas.Supervisor([spec], (), report, bring)
    process: Any = None  # of which nothing is asked
    watching = asyncio.ensure_future(supervisor._watch(supervisor._all[0], process))
    await is_ready.wait()
    assert seen == [False] * 3
    watching.cancel()
