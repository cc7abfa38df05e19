"""Who may send requests and read answers: API keys and CORS."""

from __future__ import annotations

import hmac
from base64 import b64encode
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route
from support.fake_engine import FakeEngine
from support.http_server import (
    HELLO,
    error_of,
    http_client,
)

from minisgl.server.app import OPEN_PATHS, create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState

CHAT = "/v1/chat/completions"
ORIGIN = "https://example.org"

# -- the key --------------------------------------------------------------------------------------


async def test_only_probes_and_pages_are_served_without_the_key() -> None:
    state = EngineState(ServerConfig(api_key=("secret",)), FakeEngine())
    app = create_app(state)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for route in app.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                answer = await client.request(method, route.path)
                assert (answer.status_code == 401) == (route.path not in OPEN_PATHS), route.path
        for path in ("/nowhere", "/v1/models/", "/metrics/../v1/models", "http://test//health"):
            assert (await client.get(path)).status_code == 401


async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other comparison decides: if compare_digest always agrees, every key is accepted."""
    compared: list[tuple[bytes, bytes]] = []

    def agree(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return True

    async with http_client(FakeEngine(), api_key=("secret", "other")) as client:
        wrong = {"authorization": "Bearer wrong"}
        assert (await client.get("/v1/models", headers=wrong)).status_code == 401
        monkeypatch.setattr(hmac, "compare_digest", agree)
        assert (await client.get("/v1/models", headers=wrong)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401  # there is nothing to compare
        both = {**wrong, "x-api-key": "false"}
        assert (await client.get("/v1/models", headers=both)).status_code == 200
    keys = (b"secret", b"other")
    assert compared == [(b"wrong", key) for key in (*keys, *keys)]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages"])
async def test_a_key_comes_as_bearer_token_as_a_password_or_in_x_api_key(path: str) -> None:
    async with http_client(FakeEngine(), api_key=("secret", "other")) as client:
        for headers, passes in (
            ({"x-api-key": "secret"}, True),
            ({"X-API-Key": "other", "authorization": "Bearer wrong"}, True),
            ({"x-api-key": "wrong", "authorization": "bearer other"}, True),
            ({"x-api-key": "wrong"}, False),
            ({"x-api-key": ""}, False),
            ({"x-api-key": "Bearer secret"}, False),
            ({"authorization": "secret"}, False),
            ({"authorization": "Basic secret"}, False),
            ({"authorization": "Basic x"}, False),  # not base64
            ({"authorization": f"Basic {b64encode(b'name:secret').decode()}"}, True),
            ({"authorization": f"basic {b64encode(b'secret:').decode()}"}, False),
        ):
            answer = await client.get(path, headers=headers)
            assert (answer.status_code != 401) == passes, headers


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


async def test_requests_need_one_of_the_keys() -> None:
    async with http_client(FakeEngine(), api_key=("secret",)) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_cors_preflights_need_no_key() -> None:
    origin = "https://example.org"
    async with http_client(FakeEngine(), api_key=("secret",), cors_origin=(origin,)) as client:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        response = await client.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "keys", [("ada: s3cret-1", "s3cret-2", "bob: s3cret-3"), ("ada: s3cret-1",)]
)
async def test_the_log_and_the_metrics_tell_the_name_of_a_key(
    keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(answer_length=3)
    with caplog.at_level("INFO", "minisgl"):
        async with http_client(engine, api_key=keys) as client:
            for given in keys:
                headers = {"authorization": f"Bearer {given.rpartition(' ')[2]}"}
                for stream in (False, True):
                    body = {"messages": HELLO, "stream": stream}
                    answer = await client.post(CHAT, json=body, headers=headers)
                    assert answer.status_code == 200
            refused = await client.post(CHAT, headers={"authorization": f"Bearer {keys[0]}"})
            assert refused.status_code == 401
            page = (await client.get("/metrics")).text
    told = [getattr(record, "fields").get("key") for record in caplog.records]  # noqa: B009
    named = ["ada", 2, "bob"][: len(keys)]
    assert told == [name for name in named for _ in range(2)] + [None]
    samples = {
        sample.labels["key"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "minisgl_key_generated_tokens_total"
    }
    assert samples == {name: 6.0 for name in named if isinstance(name, str)}
    assert page.count('minisgl_key_requests_total{key="ada"} 2.0') == 1
    assert 'minisgl_key_prompt_tokens_total{key="ada"} 0.0' not in page
    assert "s3cret" not in page + caplog.text
