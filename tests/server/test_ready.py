"""GET /ready: whether a request that comes now would be taken, by a server or by its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.gated_runner import asking, gated_server
from support.http_server import error_of
from support.routing import routing
from support.serving import Served, served
from support.waiting import until

from minisgl.config import EngineConfig
from minisgl.engine.stats import EngineStats
from minisgl.router.fleet import ReplicaState

COMPLETIONS = "/v1/completions"


class QueueEngine(FakeEngine):
    """So many requests wait for it."""

    def __init__(self, num_queued: int) -> None:
        super().__init__()
        self.num_queued = num_queued

    def stats(self) -> EngineStats:
        return replace(super().stats(), num_queued=self.num_queued)


MOST = EngineConfig().max_queued_requests


async def test_a_server_is_ready_unless_its_queue_is_full() -> None:
    options = {"max_running_requests": 1, "max_queued_requests": 2}
    async with (
        gated_server(**options) as gated,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gated.port}") as client,
    ):

        def post() -> asyncio.Future[httpx.Response]:
            content, kind = asking([1, 2, 3], 2), {"content-type": "application/json"}
            return asyncio.ensure_future(client.post(COMPLETIONS, content=content, headers=kind))

        def num_taken() -> int:
            stats = gated.engine.stats()
            return stats.num_running + stats.num_queued

        gated.runner.close_gate()
        taken: list[asyncio.Future[httpx.Response]] = []
        for count in range(3):  # one runs, two wait
            answer = await client.get("/ready")
            assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
            taken.append(post())
            await until(lambda count=count: num_taken() == count + 1)
        refused = await client.get("/ready")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")
        assert (await post()).status_code == 429
        assert (await client.get("/health")).status_code == 200
        gated.runner.open()
        assert {answer.status_code for answer in await asyncio.gather(*taken)} == {200}
        assert (await client.get("/ready")).status_code == 200


def stall(found: Served[FakeEngine]) -> None:
    found.engine.stalled = "A step takes long."


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("draining", lambda found: found.state.drain()),
        ("dead", lambda found: found.engine.fail(RuntimeError("the device is lost"))),
        ("stalled", stall),
    ],
)
def test_what_health_refuses_ready_refuses_without_a_key(
    code: str, change: Callable[[Served[FakeEngine]], None]
) -> None:
    async def start() -> FakeEngine:
        return FakeEngine()

    with served(start, api_key=("secret",)) as found, found.http() as http:
        assert http.get("/ready").status_code == 200
        found.on_loop(lambda: change(found))
        for path in ("/ready", "/health"):
            refused = http.get(path)
            assert (refused.status_code, error_of(refused)["code"]) == (503, code)


def test_a_server_that_loads_is_not_ready() -> None:
    async def start() -> None:
        return None

    with served(start) as found, found.http() as http:
        assert error_of(http.get("/ready"))["code"] == "loading"


@pytest.mark.parametrize("waiting", [(MOST, 0, MOST), (0, MOST, MOST)])
async def test_replicas_are_ready_while_one_of_them_is(
    tmp_path: Path, waiting: tuple[int, ...]
) -> None:
    engines = [*map(QueueEngine, waiting)]
    async with (
        routing(tmp_path, *engines, api_key=("secret",)) as (url, fleet, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        for engine in engines:
            engine.num_queued = MOST
        refused = await client.get("/ready")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")
        assert (await client.get("/health")).json()["ready"] == 3
        fleet.update([ReplicaState(start=1)] * 3)
        assert error_of(await client.get("/ready"))["code"] == "loading"
