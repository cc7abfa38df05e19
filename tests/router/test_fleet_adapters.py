"""What a router keeps of loads and unloads of adapters, for replicas that start later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from minisgl.router.adapters import FleetAdapters, ReplicaRefusedError
from minisgl.router.exchange import HTTPRequest
from minisgl.server.handlers.adapters import LOAD, UNLOAD


class Started:
    """A replica that has an adapter `first`, and does whatever it is asked for."""

    index = 0
    state = SimpleNamespace(start=1, is_ready=True, is_silent=False)

    def __init__(self) -> None:
        self.names = {"first": "0"}

    async def whole(self, sent: bytes) -> tuple[int, bytes]:
        head, _, body = sent.partition(b"\r\n\r\n")
        asked: dict[str, str] = msgspec.json.decode(body)
        if LOAD.encode() in head:
            self.names[asked["lora_name"]] = asked["lora_path"]
        elif self.names.pop(asked["lora_name"], None) is None:
            return 404, b""
        return 200, b"done"


async def ask(adapters: FleetAdapters, path: str, name: str, at: str = "") -> Response:
    body = msgspec.json.encode({"lora_name": name} | ({"lora_path": at} if at else {}))
    return await adapters._change(HTTPRequest("POST", path, b"", [], body, raw_path=path.encode()))


async def test_a_replica_that_starts_later_gets_what_the_others_have_and_no_more() -> None:
    fleet = SimpleNamespace(replicas=[Started()])
    adapters = FleetAdapters(fleet, "admin", ("first",))  # type: ignore[arg-type]
    for number in range(50):
        await ask(adapters, LOAD, f"{number}", "1")
        await ask(adapters, UNLOAD, f"{number}")
    assert not adapters._changes, "nothing is kept of what has come and gone"
    steps: list[tuple[Any, ...]] = [
        (UNLOAD, "first"),
        (LOAD, "second", "2"),
        (LOAD, "first", "3"),
        (UNLOAD, "first"),
        (LOAD, "first", "4"),
    ]
    for step in steps:
        await ask(adapters, *step)
        wanted, later = fleet.replicas[0].names, Started()
        fleet.replicas = [later]
        await adapters.bring(0)
        assert later.names == wanted


async def test_a_load_of_what_all_have_that_fails_at_one_takes_it_from_no_other() -> None:
    class Failing(Started):
        async def whole(self, sent: bytes) -> tuple[int, bytes]:
            return (500, b"") if LOAD.encode() in sent else await super().whole(sent)

    fleet = SimpleNamespace(replicas=[Started(), Failing()])
    adapters = FleetAdapters(fleet, "admin", ("first",))  # type: ignore[arg-type]
    for name, left in (("first", {"first": "0"}), ("new", {"first": "0"})):
        with pytest.raises(ReplicaRefusedError):
            await ask(adapters, LOAD, name, "0")
        assert [replica.names for replica in fleet.replicas] == [left] * 2
