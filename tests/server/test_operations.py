"""What those who run a server rely on. Complaints are numbered as in the survey of users."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from support.fake_engine import FakeEngine
from support.folders import SUPPORT
from support.http_server import (
    FAKE_SERVER,
    HELLO,
    error_of,
    free_port,
    http_client,
    running,
    serve,
    serving_process,
    session,
    tiny_model,
    wait_for_health,
)

from minisgl.server.app import create_app
from minisgl.server.auth import OPEN_PATHS
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState

__all__ = ["tiny_model"]  # a fixture

SCRIPTED_SERVER = SUPPORT / "scripted_server.py"
CHAT = "/v1/chat/completions"
ORIGIN = "https://example.org"
ENDLESS = {"messages": HELLO, "ignore_eos": True}


# -- the key --------------------------------------------------------------------------------------


async def test_only_probes_are_served_without_the_key() -> None:
    state = EngineState(ServerConfig(api_key=("secret",)), FakeEngine())
    app = create_app(state)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for route in app.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                answer = await client.request(method, route.path)
                assert (answer.status_code == 401) == (route.path not in OPEN_PATHS), route.path
        for path in ("/nowhere", "/health/", "/metrics/../v1/models", "//health"):
            assert (await client.get(path)).status_code == 401


async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else decides: with a comparison that always agrees every key is right."""
    compared: list[tuple[bytes, bytes]] = []

    def agree(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return True

    async with http_client(FakeEngine(), api_key=("secret", "other")) as client:
        wrong = {"authorization": "Bearer wrong"}
        assert (await client.get("/v1/models", headers=wrong)).status_code == 401
        monkeypatch.setattr(hmac, "compare_digest", agree)
        assert (await client.get("/v1/models", headers=wrong)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
    keys = (b"bearer secret", b"bearer other")
    assert compared == [(given, key) for given in (b"bearer wrong", b"") for key in keys]


# -- web pages ------------------------------------------------------------------------------------


async def test_an_allowed_origin_can_send_requests_and_read_every_answer() -> None:
    options: dict[str, Any] = {"api_key": ("secret",), "cors_origin": (ORIGIN,)}
    async with http_client(FakeEngine(answer_length=3), **options) as client:
        # What a browser sends before a JSON body with a key goes out, and what it needs to see.
        asked = {
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert {name.strip() for name in allowed.split(",")} >= {"authorization", "content-type"}

        key = {"authorization": "Bearer secret"}
        page = {"origin": ORIGIN}
        answers = [
            await client.post(CHAT, json={"messages": HELLO}, headers=page | key),
            await client.post(CHAT, json={"messages": HELLO, "stream": True}, headers=page | key),
            await client.post(CHAT, json={}, headers=page | key),
            await client.post(CHAT, json={"messages": HELLO}, headers=page),
            await client.get("/nowhere", headers=page | key),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 404]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_other_origins_cannot_read_any_answer() -> None:
    async with http_client(FakeEngine(answer_length=3), cors_origin=(ORIGIN,)) as client:
        foreign = {"origin": "https://example.com"}
        preflight = await client.options(
            CHAT, headers=foreign | {"access-control-request-method": "POST"}
        )
        assert preflight.status_code == 400
        answer = await client.post(CHAT, json={"messages": HELLO}, headers=foreign)
        for response in (preflight, answer):
            assert "access-control-allow-origin" not in response.headers
    async with http_client(FakeEngine(answer_length=3), cors_origin=("*",)) as client:
        answer = await client.post(CHAT, json={"messages": HELLO}, headers=foreign)
        assert answer.headers["access-control-allow-origin"] == "*"
    async with http_client(FakeEngine(answer_length=3)) as client:
        answer = await client.post(CHAT, json={"messages": HELLO}, headers=foreign)
        assert "access-control-allow-origin" not in answer.headers


# -- the process ----------------------------------------------------------------------------------


def test_the_process_parses_http_with_httptools() -> None:
    """Which, unlike h11, knows all methods that there are."""
    with serving_process({}) as (_, url):
        wait_for_health(url, 200)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"BREW /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Invalid HTTP request received." in answer


def test_a_process_logs_running_requests_every_few_seconds() -> None:
    with serving_process({"interval": 0.02}) as (process, url):
        wait_for_health(url, 200)
        asked = {"messages": HELLO, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=asked) as stream:
            lines = stream.iter_lines()  # once that is gone, the client has left
            next(lines)
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("running: "))
    # The engine has no CUDA graphs, of which another line would tell.
    told = "running: 1, queued: 0, token usage: 0.00, cache hit rate: -, generation: "
    assert line.startswith(told)


def test_a_process_has_probes_metrics_a_key_cors_and_a_readable_log(tiny_model: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = serve(tiny_model, port, "--api-key", "secret", "--cors-origin", ORIGIN)
    with (
        running(*command) as process,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        wait_for_health(url, 503, seconds=60)
        loading = client.get("/metrics")
        assert loading.status_code == 200
        assert "minisgl_info{" in loading.text
        wait_for_health(url, 200, seconds=60)
        assert client.get("/version").json()["version"]
        assert error_of(client.post(CHAT, json={"messages": HELLO}))["code"] == "invalid_api_key"
        key = {"authorization": "Bearer secret", "origin": ORIGIN}
        asked = {**ENDLESS, "max_tokens": 20}
        answer = client.post(CHAT, json=asked, headers=key)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        metrics = client.get("/metrics").text.splitlines()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    num_prompt = answer.json()["usage"]["prompt_tokens"]
    for line in (
        f"minisgl_prompt_tokens_total {num_prompt}.0",
        "minisgl_generated_tokens_total 20.0",
        'minisgl_requests_finished_total{reason="length"} 1.0',
        f'minisgl_http_responses_total{{route="{CHAT}",status="200"}} 1.0',
        "minisgl_inter_token_seconds_count 19.0",
    ):
        assert line in metrics
    # The one request that was refused has a line; the answered one and the probes have none.
    [line] = [line[9:] for line in log.splitlines() if " request " in line]
    assert re.fullmatch(r"INFO request \w+: 401 invalid_api_key", line)


# -- the end of the engine and of the process -----------------------------------------------------


def members(session: int) -> set[int]:
    """The processes of a session, which orphans do not leave."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of_session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_session) == session and state != "Z":
                found.add(int(stat.parent.name))
    return found


def wait_for_nobody(session: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while left := members(session):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


async def test_a_dead_engine_fails_requests_health_and_process() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with session(str(SCRIPTED_SERVER), "4", json.dumps({"port": port})) as process:
        await asyncio.to_thread(wait_for_health, url, 200, 60)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def ask(stream: bool) -> httpx.Response:
                return await client.post(CHAT, json={**ENDLESS, "stream": stream})

            # Two run and two wait when the device dies.
            answers = await asyncio.gather(*map(ask, (True, False, True, False)))
            with contextlib.suppress(httpx.TransportError):  # or nobody listens any more
                assert (await client.get("/health")).status_code == 503
        for answer in answers[::2]:
            assert answer.status_code == 200
            *_, error, done = [line for line in answer.text.splitlines() if line]
            assert done == "data: [DONE]"
            body = json.loads(error.removeprefix("data: "))["error"]
            assert (body["type"], body["message"]) == ("service_unavailable", "The device is gone.")
        for answer in answers[1::2]:
            assert answer.status_code == 503
            assert error_of(answer)["message"] == "The device is gone."
        _, log = await asyncio.to_thread(process.communicate, timeout=20)
        assert process.returncode == 1
        assert "The device is gone." in log
        wait_for_nobody(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_process_outlives_the_server(tiny_model: Path, number: signal.Signals) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with session(*serve(tiny_model, port, "--drain-timeout", "0")) as process:
        wait_for_health(url, 200, seconds=60)
        asked = {**ENDLESS, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=asked, timeout=30) as stream:
            lines = stream.iter_lines()  # once that is gone, the client has left
            next(lines)
            assert process.pid in members(process.pid)
            process.send_signal(number)
            process.communicate(timeout=20)
        assert process.returncode == (-number if number == signal.SIGKILL else 0)
        wait_for_nobody(process.pid)


def test_a_server_that_cannot_start_leaves_no_process() -> None:
    arguments = (json.dumps({"load_error": "no such weights"}), json.dumps({"port": 0}))
    with session(str(FAKE_SERVER), *arguments) as process:
        process.communicate(timeout=20)
        assert process.returncode == 1
        wait_for_nobody(process.pid)
