"""Prompts and answers stay out of the log, at every level and in every error."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from starlette.routing import Route
from support.engine_loop import ScriptedRunner, engine_on
from support.fake_engine import FakeEngine
from support.forked_programs import Session, forked_session
from support.http_server import http_client, serve, wait_for_health
from support.waiting import LIMIT_S, until

from minisgl.errors import (
    CallerError,
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    ModelNotFoundError,
    StepError,
)
from minisgl.request import SamplingParams
from minisgl.server.app import application
from minisgl.server.config import ServerConfig

SECRET = "xyzzy"  # of letters that no word of ours has in this order
CHAT = "/v1/chat/completions"
ANTHROPIC = "/v1/messages"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": SECRET}]

# Bodies that are refused, with the secret in every place that a message to the client may quote.
REFUSED: list[tuple[str, Any]] = [
    (CHAT, SECRET),
    (CHAT, [SECRET]),
    (CHAT, {SECRET: SECRET}),
    (CHAT, {"messages": SECRET}),
    (CHAT, {"messages": [SECRET]}),
    (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}),
    (CHAT, {"messages": [{"role": "user", "content": {SECRET: SECRET}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": SECRET + "\ud800"}]}),
    (CHAT, {"messages": MESSAGES, "model": SECRET}),
    (CHAT, {"messages": MESSAGES, SECRET: SECRET, "max_tokens": 5}),
    (CHAT, {"messages": MESSAGES, "temperature": SECRET}),
    (CHAT, {"messages": MESSAGES, "temperature": 3}),
    (CHAT, {"messages": MESSAGES, "stop": [[SECRET]]}),
    (CHAT, {"messages": MESSAGES, "stop": ["", SECRET]}),
    (CHAT, {"messages": MESSAGES, "logit_bias": {SECRET: 1}}),
    (CHAT, {"messages": MESSAGES, "tools": [SECRET]}),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": SECRET}}),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": SECRET}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 10_000}),
    (CHAT, {"messages": [{"role": "user", "content": SECRET * 1000}]}),
    (COMPLETIONS, {"prompt": {SECRET: SECRET}}),
    (COMPLETIONS, {"prompt": [SECRET, 1]}),
    (COMPLETIONS, {"prompt": SECRET, "suffix": SECRET}),
    (COMPLETIONS, {"prompt": SECRET, "user": {SECRET: SECRET}, "n": 1000}),
    (RESPONSES, {"input": SECRET, "model": SECRET}),
    (RESPONSES, {"input": [{"role": SECRET, "content": SECRET}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": SECRET}]}]}),
    (RESPONSES, {"input": SECRET, "tools": [{"type": "function", "name": SECRET + " "}]}),
    (RESPONSES, {"input": SECRET, "text": {"format": {"type": SECRET}}}),
    (RESPONSES, {"input": SECRET, "previous_response_id": SECRET}),
    (RESPONSES, {"input": SECRET * 1000}),
    (ANTHROPIC, {"messages": MESSAGES, "model": SECRET}),
    (ANTHROPIC, {"messages": [{"role": SECRET, "content": SECRET}]}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", SECRET: SECRET}]}]}),
    (ANTHROPIC, {"messages": MESSAGES, "tools": [{"name": SECRET, "input_schema": [SECRET]}]}),
    (ANTHROPIC, {"messages": MESSAGES, "system": {SECRET: SECRET}}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": SECRET * 1000}]}),
]
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 5}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "stream": True, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "stop": SECRET, "user": SECRET}),
    (COMPLETIONS, {"prompt": SECRET, "max_tokens": 5, "echo": True}),
    (
        RESPONSES,
        {
            "input": SECRET,
            "instructions": SECRET,
            "max_output_tokens": 5,
            "metadata": {SECRET: SECRET},
            "tools": [{"type": "web_search", "name": SECRET}, {"type": SECRET}],
            "stream": True,
        },
    ),
    (
        ANTHROPIC,
        {
            "messages": MESSAGES,
            "system": SECRET,
            "max_tokens": 5,
            "tools": [{"type": "web_search_20250305", "name": SECRET}],
            "stream": True,
        },
    ),
    (COMPLETIONS, {"prompt": [SECRET, SECRET], "max_tokens": 5, "echo": True, "stream": True}),
]


@contextmanager
def logging_server(port: int, *command: str) -> Iterator[tuple[Session, str]]:
    """A serving process that logs all it can, and its URL."""
    told = {"LOG_LEVEL": "DEBUG", "PYTHONASYNCIODEBUG": "0"}
    with forked_session(*command, "--port", str(port), **told) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(process, url, 200)
        yield process, url


# One key for all, since the real client would not put it into a body.
@pytest.mark.parametrize("strict", [False, True])
def test_no_log_line_contains_words_of_prompts_or_answers(
    tiny_model: Path, port: int, strict: bool
) -> None:
    command = serve(tiny_model, 0, "--api-key", "a-key", *(["--strict-fields"] if strict else []))
    with logging_server(port, *command) as (process, url):
        headers = {"authorization": "Bearer a-key", "content-type": "application/json"}
        with httpx.Client(base_url=url, headers=headers) as client:
            for path, body in ANSWERED:
                answer = client.post(path, content=json.dumps(body))
                assert answer.status_code == 200
                # The tiny model says what it likes; only an echo, or instructions, have the word.
                assert (SECRET in answer.text) == ("echo" in body or "instructions" in body)
            for path, body in REFUSED:
                status = client.post(path, content=json.dumps(body)).status_code
                ignored = SECRET in body and "messages" in body and not strict
                assert (status == 200) if ignored else (400 <= status < 500), (body, status)
            for broken in (b'{"prompt": "%s' % SECRET.encode(), SECRET.encode(), b"\xff\xfe"):
                assert client.post(COMPLETIONS, content=broken).status_code == 400
            text = {"content-type": f"text/{SECRET}"}
            assert client.post(CHAT, content=SECRET, headers=text).status_code == 400
            for path in (f"/{SECRET}", f"/v1/models/{SECRET}", f"/v1/models?q={SECRET}"):
                client.get(path)
            client.request(SECRET.upper(), "/v1/models", content=SECRET)
            wrong = {"authorization": f"Bearer {SECRET}"}
            assert client.post(CHAT, json=MESSAGES, headers=wrong).status_code == 401
            asked = {"messages": MESSAGES, "stream": True, "ignore_eos": True}
            leave_before_the_answer(process, url, asked)
            # The first may be gone before its request reaches the engine, the others are not.
            while 'finished_total{reason="abort"} 0.0' in client.get("/metrics").text:
                with client.stream("POST", CHAT, json=asked) as answer:
                    next(answer.iter_raw())
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert SECRET not in log.lower()
    assert "Traceback" not in log
    # The lines are there: of endings at DEBUG, and of each refusal with status and reason.
    assert " DEBUG request chatcmpl-" in log
    assert ": length after " in log
    assert ": abort after " in log
    begin = rf" INFO request \w+: POST {CHAT} "
    end = r" in [\d.]+ s client=127\.0\.0\.1: "
    assert re.search(rf"{begin}400{end}messages\.0\.role: invalid value$", log, re.M)
    assert re.search(rf"{begin}401{end}invalid_api_key$", log, re.M)
    assert re.search(rf"{begin}404{end}model: model_not_found$", log, re.M)
    assert ": This model's maximum context length is " in log
    assert log.count(" INFO request ") >= len(REFUSED)


def leave_before_the_answer(
    process: subprocess.Popen[str], url: str, asked: dict[str, Any]
) -> None:
    """Send a request and be gone before the server, which is stopped meanwhile, reads it."""
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a-key\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    process.send_signal(signal.SIGSTOP)
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
        client.sendall(head.encode() + body)
    process.send_signal(signal.SIGCONT)


class UnforeseenError(Exception):
    def __str__(self) -> str:
        return SECRET


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_is_logged_by_type_and_place_without_its_message(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(interval=0.01)
    with caplog.at_level(logging.DEBUG):
        async with http_client(engine) as client:
            asked = {"messages": MESSAGES, "stream": stream}
            asking = asyncio.ensure_future(client.post(CHAT, json=asked))
            await until(lambda: bool(engine.running))
            next(iter(engine.running.values())).fail(UnforeseenError())
            answer = await asking
    assert answer.status_code == (200 if stream else 500)
    assert "internal_error" in answer.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    line, _, frames = record.getMessage().partition("\n")
    id = answer.headers["x-request-id"]
    assert line.startswith(f"request {id}: POST {CHAT} {answer.status_code} in ")
    assert line.endswith(": UnforeseenError")
    assert "delivery.py" in frames
    assert SECRET not in caplog.text


async def test_an_engine_defect_reveals_no_text_of_other_requests(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise UnforeseenError

    with caplog.at_level(logging.DEBUG):
        async with engine_on(ScriptedRunner(page_size=4), tokenizer=True) as engine:
            monkeypatch.setattr(engine._delivery, "_detokenize", broken)
            for stream in [engine.submit([n], SamplingParams()) for n in range(2)]:
                with pytest.raises(EngineStoppedError, match=r"^UnforeseenError$"):
                    await stream.wait_finished()
            with pytest.raises(EngineStoppedError, match=r"failed: UnforeseenError$"):
                engine.submit([1], SamplingParams())
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "loop.py" in record.getMessage()
    assert SECRET not in caplog.text


async def test_a_request_is_logged_under_the_id_that_it_came_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_client(FakeEngine(answer_length=2)) as client:
        client.headers["x-request-id"] = "mine"
        with caplog.at_level(logging.DEBUG, "minisgl"):
            await client.post(CHAT, json={"messages": MESSAGES})
            await client.post(CHAT, json={})
            await until(lambda: len(caplog.messages) == 2)
    ended, refused = caplog.messages
    assert ended.startswith(f"request mine: POST {CHAT} 200 in ")
    assert refused.startswith(f"request mine: POST {CHAT} 400 in ")
    assert refused.endswith(": messages: is missing")


@pytest.mark.parametrize(
    ("error", "level", "reason"),
    [
        (
            InvalidRequestError("messages.3.content", SECRET),
            "INFO",
            " messages.3.content: invalid value",
        ),
        (InvalidRequestError(SECRET, SECRET), "INFO", " a field: invalid value"),
        (InvalidRequestError("stop", SECRET, logged="is missing"), "INFO", " stop: is missing"),
        (InvalidRequestError(f"messages.{SECRET}", SECRET), "INFO", " a field: invalid value"),
        (CallerError(SECRET), "INFO", " invalid request"),
        (ModelNotFoundError(SECRET), "INFO", "model_not_found"),
        (ContextLengthError(70, 30, 64), "INFO", "or completion."),
        (StepError("Step 9 ran out of memory."), "WARNING", "Step 9 ran out of memory."),
        (ZeroDivisionError(SECRET), "ERROR", "ZeroDivisionError"),
    ],
)
async def test_a_failed_request_has_one_log_line(
    error: Exception, level: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: object) -> NoReturn:
        raise error

    routes = [Route("/tokenize", fail)]
    app = application(routes, ServerConfig(), Counter(), None)
    with caplog.at_level(logging.DEBUG, "minisgl"):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            answer = await client.get("/tokenize", headers={"x-request-id": "an-id"})
    [record] = caplog.records
    assert record.levelname == level
    said = f"request an-id: GET /tokenize {answer.status_code} in "
    assert record.getMessage().startswith(said)
    assert record.getMessage().partition("\n")[0].endswith(reason)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (SECRET, "The body is not valid JSON"),
        (f'["{SECRET}"]', "The body is not a request"),
        (f'{{"messages": "{SECRET}"}}', "messages: must be a list, not a text"),
        (
            '{"messages": [{"role": "user", "content": ""}], "temperature": -7}',
            "temperature: must be from 0 to 2",
        ),
        (f'{{"messages": [{{"role": "{SECRET}"}}]}}', "messages.0.role: invalid value"),
        (f'{{"n": "Expected `int` {SECRET}"}}', "n: must be an integer, not a text"),
    ],
)
async def test_the_log_says_in_words_why_a_body_is_refused(
    body: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_client(FakeEngine()) as client:
        with caplog.at_level(logging.INFO, "minisgl"):
            client.headers["content-type"] = "application/json"
            assert (await client.post(CHAT, content=body)).status_code == 400
    [record] = caplog.messages
    assert record.partition(" client=127.0.0.1: ")[2] == reason


async def test_every_request_has_one_line_and_probes_have_theirs_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_client(FakeEngine(answer_length=2)) as client:
        with caplog.at_level(logging.INFO, "minisgl"):
            answer = await client.post(CHAT, json={"messages": MESSAGES})
            await client.get("/health")
            id = answer.headers["x-request-id"]
            await until(lambda: f"request {id}: " in caplog.text)
        [line] = caplog.messages
        assert line.startswith(f"request {id}: POST {CHAT} 200 in ")
        with caplog.at_level(logging.DEBUG, "minisgl"):
            await client.get("/health")
            await until(lambda: ": GET /health 200 in " in caplog.text)


async def test_a_probe_while_loading_leaves_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        async with http_client(None) as client:
            assert (await client.get("/health")).status_code == 503
            assert caplog.messages == []
            answer = await client.post(CHAT, json={})
            assert answer.status_code == 503
    [line] = caplog.messages
    assert line.startswith(f"request {answer.headers['x-request-id']}: POST {CHAT} 503 in ")
    assert line.endswith(": The model is still loading.")
