"""The records of requests in the log, as text and as JSON: what they tell, and what not."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.forked_programs import forked_session
from support.http_server import HELLO, http_client, serve, wait_for_health
from support.routing import routing
from support.waiting import LIMIT_S, until

from minisgl_cli.logs import set_up_logging

CHAT = "/v1/chat/completions"
KEYS = "first-s3cret", "second-s3cret"
ADMIN = "admin-s3cret"
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def test_each_line_of_the_log_is_json_and_each_request_has_one_without_secrets(
    tiny_model: Path, port: int
) -> None:
    options = [f"--api-key={each}" for each in KEYS] + ["--admin-key", ADMIN]
    command = serve(tiny_model, port, *options, "--log-format", "json", "--log-level", "INFO")
    began = datetime.now().astimezone()
    url = f"http://127.0.0.1:{port}"
    with forked_session(*command, LOG_LEVEL="ERROR") as process:
        wait_for_health(process, url, 200)
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "s3cret"}],
            "max_tokens": 5,
            "ignore_eos": True,
        }
        with httpx.Client(base_url=url, headers=key(KEYS[1])) as client:

            def ask(id: str, body: Any = asked, path: str = CHAT, **headers: str) -> httpx.Response:
                return client.post(path, json=body, headers={"x-request-id": id, **headers})

            usage = ask("whole").json()["usage"]
            streamed = ask("streamed", asked | {"stream": True, "n": 2})
            assert streamed.text.endswith("[DONE]\n\n")
            assert ask("as-admin", authorization=f"Bearer {ADMIN}").status_code == 200
            assert ask("wrong-key", **key("third-s3cret")).status_code == 401
            assert ask("unknown-path", path="/s3cret?key=s3cret").status_code == 404
            assert ask("invalid", asked | {"temperature": "s3cret"}).status_code == 400
            with client.stream(
                "POST",
                CHAT,
                json=asked | {"stream": True, "max_tokens": 10_000},
                headers={"x-request-id": "refused"},
            ) as refused:
                assert refused.status_code == 400
            endless = {"messages": HELLO, "stream": True, "ignore_eos": True}
            headers = {"x-request-id": "left"}
            # An answer may end before its client has left.
            while 'finished_total{reason="abort"} 0.0' in client.get("/metrics").text:
                with client.stream("POST", CHAT, json=endless, headers=headers) as answer:
                    next(answer.iter_raw())
            with httpx.Client(base_url=f"http://user:{KEYS[0]}@127.0.0.1:{port}") as other:
                models = other.get("/v1/models/s3cret", headers={"x-request-id": "in-url"})
            assert models.status_code == 404
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=LIMIT_S)
    assert "s3cret" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert line["level"] in ("INFO", "WARNING", "ERROR")
        assert began <= datetime.fromisoformat(line["time"]) <= datetime.now().astimezone()
    records = [line for line in lines if "request_id" in line]
    assert all(line["message"] for line in lines if line not in records)
    found = {line["request_id"]: line for line in records}
    names = "whole streamed as-admin wrong-key unknown-path invalid refused left in-url".split()
    assert sorted(found) == sorted(names)
    counts = Counter(line["request_id"] for line in records)
    assert all(count == 1 for name, count in counts.items() if name != "left")
    for line in records:
        assert line["client"] == "127.0.0.1"
        assert 0 <= line.get("first_token_s", 0) <= line["total_s"]
    whole = found["whole"]
    assert [whole[name] for name in ("method", "route", "status", "key")] == ["POST", CHAT, 200, 2]
    assert "reason" not in whole
    assert 0 <= whole["queue_s"] < whole["first_token_s"] < whole["total_s"]
    assert [whole[name] for name in TOKENS] == [usage["prompt_tokens"], 0, 5]
    assert found["streamed"]["prompt_tokens"] == usage["prompt_tokens"]
    assert found["streamed"]["output_tokens"] == 10
    assert found["as-admin"]["key"] == 3
    assert found["in-url"]["key"] == 1
    for name, route, status, reason in (
        ("wrong-key", CHAT, 401, "invalid_api_key"),
        ("unknown-path", "other", 404, "unknown_url"),
        ("invalid", CHAT, 400, "temperature: must be a number, not a text"),
        ("left", CHAT, 200, "the client left"),
    ):
        line = found[name]
        assert [line["route"], line["status"], line["reason"]] == [route, status, reason]
    assert found["left"]["output_tokens"] > 0
    assert not {"key", *TOKENS} & {*found["wrong-key"]}


async def test_vectors_tell_the_tokens_of_their_texts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        async with http_client(FakeEngine(task="embed")) as client:
            answer = await client.post("/v1/embeddings", json={"input": ["a", "bcd"]})
    [line] = caplog.messages
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert f" client=127.0.0.1 prompt_tokens={num_tokens}" in line


@pytest.mark.parametrize("has_trainer", [False, True])
async def test_endpoints_that_an_option_brings_are_told_by_their_paths(
    has_trainer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        async with http_client(FakeEngine(), trainer=has_trainer, admin_key="admin") as client:
            await client.get("/is_sleeping")
    [line] = caplog.messages
    told = "GET /is_sleeping 401 " if has_trainer else "GET other 404 "
    assert told in line


async def test_a_client_that_leaves_before_its_answer_is_told_with_what_was_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with caplog.at_level(logging.INFO, "minisgl"):
        async with http_client(engine) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json={"messages": HELLO}))
            await until(lambda: bool(engine.running))
            asking.cancel()
            await until(lambda: bool(caplog.messages))
    [line] = caplog.messages
    assert f": POST {CHAT} 499 in " in line
    assert " output_tokens=0: the client left" in line


async def test_a_router_tells_the_client_the_route_and_the_replica_and_its_replica_the_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        async with (
            routing(tmp_path, FakeEngine(answer_length=2)) as (url, *_),
            httpx.AsyncClient(base_url=url) as client,
        ):
            headers = {"x-request-id": "mine"}
            for stream in (False, True):
                asked = {"messages": HELLO, "stream": stream}
                await client.post(CHAT, json=asked, headers=headers)
            await until(lambda: len(caplog.messages) == 4)
    told = [getattr(record, "fields") for record in caplog.records]  # noqa: B009
    assert all(each["request_id"] == "mine" and each["route"] == CHAT for each in told)
    routed = [each for each in told if "replica" in each]
    assert [(each["replica"], each["client"]) for each in routed] == [(0, "127.0.0.1")] * 2
    served = [each for each in told if "output_tokens" in each]
    assert [each["output_tokens"] for each in served] == [2, 2]
    assert len(routed) == len(served) == 2


@pytest.mark.usefixtures("logging_as_before")
def test_json_lines_hold_any_message_and_traceback_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging(name="replica 1", level="WARNING", form="json")
    logger = logging.getLogger("minisgl.some")
    logger.info("not shown")
    said = 'a "word",\n\x1b[1m \u2028 \ud800 Köln'
    logger.warning("%s", said)
    logging.getLogger("another.package").warning("a word")
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        logger.exception("It failed")
    err = capsys.readouterr().err
    assert err.isascii()
    first, other, failed = map(json.loads, err.splitlines())
    assert (first["message"], first["process"], first["logger"]) == (said, "replica 1", logger.name)
    assert (other["message"], other["logger"]) == ("a word", "another.package")
    assert failed["level"] == "ERROR" and "ZeroDivisionError: oh" in failed["traceback"]
