"""Errors have OpenAI's envelope and the request's id, and affect no other request."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine
from support.serving import Served, served
from support.waiting import wait_until

from minisgl.server.http.bodies import MAX_BODY_BYTES, MAX_VALUES

HELLO: Any = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104]},
}


@contextlib.contextmanager
def scripted_server() -> Iterator[Served[FakeEngine]]:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=3, max_seq_len=20)

    with served(start) as found:
        yield found
        assert not found.engine.running


@pytest.fixture
def scripted() -> Iterator[Served[FakeEngine]]:
    with scripted_server() as found:
        yield found


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """To one server for all tests that leave it as it is."""
    with scripted_server() as found, found.http() as client:
        yield client


def check_error(
    response: httpx.Response,
    status: int,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> str:
    """Returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    message = error.pop("message")
    assert error == {"type": type, "param": param, "code": code}
    assert isinstance(message, str) and 0 < len(message) <= 1000
    assert "Traceback" not in response.text
    return message


# -- the request itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\x00",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"a": "b"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"null",
        b'"text"',
        b"5",
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    message = check_error(http.post(path, content=body, headers=JSON), 400)
    assert message.startswith("The body is not")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "json"]
)
def test_other_content_types_are_refused(
    http: httpx.Client, path: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps(BODIES[path]).encode()
    message = check_error(http.post(path, content=body, headers=headers), 400)
    assert "application/json" in message


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_json_content_types_are_accepted(http: httpx.Client, path: str, content_type: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    assert http.post(path, content=body, headers={"content-type": content_type}).status_code == 200


@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_two_json_objects_is_a_400(http: httpx.Client, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    check_error(http.post(path, content=body + body, headers=JSON), 400)


def test_unknown_urls_and_methods_have_the_envelope(http: httpx.Client) -> None:
    check_error(http.get("/nowhere"), 404, code="unknown_url")
    check_error(http.post("/nowhere", json={}), 404, code="unknown_url")
    for path in POSTS:
        response = http.get(path)
        check_error(response, 405, code="method_not_allowed")
        assert response.headers["allow"] == "POST"
    check_error(http.post("/v1/models", json={}), 405, code="method_not_allowed")


@pytest.mark.parametrize("path", POSTS)
def test_an_unknown_model_is_a_404(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={**BODIES[path], "model": "gpt-4o"})
    message = check_error(response, 404, param="model", code="model_not_found")
    assert "gpt-4o" in message and "fake" in message
    assert http.post(path, json={**BODIES[path], "model": "fake"}).status_code == 200


def test_a_model_url_describes_a_served_model_only(http: httpx.Client) -> None:
    check_error(http.get("/v1/models/gpt-4o"), 404, param="model", code="model_not_found")
    assert http.get("/v1/models/fake").json() == http.get("/v1/models").json()["data"][0]


def test_a_body_that_is_too_large_is_a_413(http: httpx.Client) -> None:
    parts = (b" " * (1 << 20) for _ in range((MAX_BODY_BYTES >> 20) + 1))
    for body in (b" " * (MAX_BODY_BYTES + 1), parts):
        response = http.post(POSTS[0], content=body, headers=JSON)
        check_error(response, 413, code="request_too_large")
        # Else the client might send the next request before it sees that the connection ends.
        assert response.headers["connection"] == "close"
    largest = b'{"tokens": []%s}' % (b" " * (MAX_BODY_BYTES - 14))
    assert len(largest) == MAX_BODY_BYTES
    assert http.post("/detokenize", content=largest, headers=JSON).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "piece", "size"),
    [
        ('{"prompt": [%s5]}', "5,", 1),
        ('{"prompt": [%s[]]}', "[],", 2),
        ('{"prompt": "a", "metadata": {"a": [%s5]}}', "[{}],", 3),
        ('{"prompt": "%s"}', ",", 1),
    ],
)
def test_a_body_of_too_many_values_is_a_400(
    http: httpx.Client, body: str, piece: str, size: int
) -> None:
    """Decoding them would keep the event loop from its streams."""

    def post(count: int) -> httpx.Response:
        content = (body % (piece * count)).encode()
        return http.post(POSTS[1], content=content, headers=JSON)

    assert post(MAX_VALUES // size - 10).status_code == (200 if "metadata" in body else 400)
    message = check_error(post(MAX_VALUES // size + 10), 413, code="request_too_large")
    assert str(MAX_VALUES) in message


def test_a_body_announced_as_too_large_is_refused_before_it_arrives(
    scripted: Served[FakeEngine],
) -> None:
    port = int(scripted.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (1 << 40)
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_an_error_message_quotes_only_part_of_a_long_value(http: httpx.Client) -> None:
    long = "x" * 1_000_000
    response = http.post(POSTS[1], json={"prompt": "a", "model": long})
    check_error(response, 404, param="model", code="model_not_found")
    part = {"role": "user", "content": [{"type": long}]}
    for body in ({"messages": [part]}, {"messages": [{"role": long}]}, {"messages": long}):
        response = http.post(POSTS[0], json=body)
        assert response.status_code == 400
        assert len(response.content) < 3000
        assert response.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400, "1" + "0" * 5000])
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "n", "max_tokens", "top_k"])
def test_numbers_out_of_range_are_refused_by_name(
    http: httpx.Client, field: str, number: str
) -> None:
    body = b'{"prompt": "a", "%s": %s}' % (field.encode(), number.encode())
    check_error(http.post(POSTS[1], content=body, headers=JSON), 400, param=field)


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [20, 21, 5000])
def test_a_prompt_longer_than_the_context_is_a_400(
    http: httpx.Client, length: int, stream: bool
) -> None:
    """Refused before the first byte of a stream, with both lengths."""
    long = "x" * (length - len("<user>"))
    cases: list[tuple[str, dict[str, Any], str]] = [
        (POSTS[0], {"messages": [{"role": "user", "content": long}]}, "messages"),
        (POSTS[1], {"prompt": "x" * length}, "prompt"),
        (POSTS[1], {"prompt": [120] * length}, "prompt"),
        (POSTS[1], {"prompt": ["short", "x" * length]}, "prompt"),
    ]
    for path, body, param in cases:
        response = http.post(path, json={**body, "stream": stream})
        message = check_error(response, 400, param=param, code="context_length_exceeded")
        assert message.startswith("This model's maximum context length is 20 tokens. However, ")
        assert f" {length} " in message or f"({length} in the {param}" in message


def test_max_tokens_beyond_the_remaining_context_is_a_400(http: httpx.Client) -> None:
    body = {"prompt": "x" * 15, "max_tokens": 6}
    response = http.post(POSTS[1], json=body)
    message = check_error(response, 400, param="prompt", code="context_length_exceeded")
    assert message.startswith(
        "This model's maximum context length is 20 tokens. However, you requested 21 tokens (15 in "
        "the prompt, 6 in the completion). Please reduce the length of the prompt or completion."
    )
    assert "max_tokens may be up to 5" in message
    assert http.post(POSTS[1], json={**body, "max_tokens": 5}).status_code == 200
    assert http.post(POSTS[1], json={"prompt": "x" * 15}).status_code == 200


@pytest.mark.parametrize(
    ("path", "limit", "param"),
    [
        (POSTS[0], {"max_tokens": 20}, "max_tokens"),
        (POSTS[0], {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (POSTS[0], {"max_completion_tokens": 20, "max_tokens": 5}, "max_completion_tokens"),
        (POSTS[0], {"max_tokens": 19}, "messages"),
        (POSTS[1], {"max_tokens": 20}, "max_tokens"),
        (POSTS[1], {"max_tokens": 18}, "prompt"),
    ],
)
def test_max_tokens_that_leave_no_room_for_a_prompt_are_refused_by_name(
    http: httpx.Client, path: str, limit: dict[str, int], param: str
) -> None:
    response = http.post(path, json={**BODIES[path], **limit})
    message = check_error(response, 400, param=param, code="context_length_exceeded")
    name, asked = next(iter(limit.items()))
    assert f"{name} may be up to" in message and f"{asked} in the completion" in message


@pytest.mark.parametrize("path", POSTS[:2])
def test_context_errors_have_the_words_that_clients_look_for(http: httpx.Client, path: str) -> None:
    """By words that litellm and others search for, and by those of the older `openai`."""
    response = http.post(path, json={**BODIES[path], "max_tokens": 20})
    message = response.json()["error"]["message"].lower()
    assert "this model's maximum context length is" in message
    part = "messages" if path == POSTS[0] else "prompt"
    pattern = rf"however, you requested \d+ tokens \(\d+ in the {part}, 20 in the completion\)"
    assert re.search(pattern, message)


def test_a_slash_at_the_end_of_a_path_is_left_out(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models"):
        response = http.get(f"{path}/?a=b")
        assert response.status_code == 200
        assert response.content == http.get(path).content
    assert http.post(f"{POSTS[0]}/", json=BODIES[POSTS[0]]).status_code == 200
    assert http.get("/nothing/").status_code == 404


def test_a_page_with_a_slash_at_the_end_redirects(http: httpx.Client) -> None:
    response = http.get("/docs/?a=b")
    assert response.status_code == 307
    assert response.headers["location"] == f"{http.base_url.copy_with(path='/docs')}?a=b"


# -- keys, full queues, phases --------------------------------------------------------------------


def test_missing_and_wrong_keys_are_a_401() -> None:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=1)

    with served(start, api_key=("secret",)) as locked, locked.http() as http:
        for authorization in (
            *("", "Bearer", "Bearer wrong", "Bearer secrets", "secret", "Bearer ü"),
            *("Basic secret", "Bearer  secret"),
        ):
            headers = {"authorization": authorization.encode()}
            for path in POSTS:
                response = http.post(path, json=BODIES[path], headers=headers)
                check_error(response, 401, code="invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/v1/models/fake", "/openapi.json", "/nowhere"):
                check_error(http.get(path, headers=headers), 401, code="invalid_api_key")
        for path in ("/health", "/version"):
            assert http.get(path).status_code == 200
        for authorization in ("Bearer secret", "bearer secret"):
            assert http.get("/v1/models", headers={"authorization": authorization}).is_success
        with locked.openai(api_key="secret") as client:
            assert client.models.list().data[0].id == "fake"
        with locked.openai() as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    async def start() -> FakeEngine:
        return FakeEngine(max_queued=2)

    with served(start) as full, full.http() as http, full.openai() as client:
        response = http.post(POSTS[1], json={"prompt": "x", "n": 3})
        check_error(response, 429, type="rate_limit_error", code="queue_full")
        assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=HELLO, n=3, stream=True)
        assert caught.value.code == "queue_full"
        assert not full.engine.running


def check_phase(http: httpx.Client, code: str) -> None:
    """Routes that need the engine are refused; the others work."""
    for path in POSTS:
        response = http.post(path, json=BODIES[path])
        check_error(response, 503, type="service_unavailable", code=code)
    for path in ("/health", "/v1/models", "/v1/models/fake"):
        check_error(http.get(path), 503, type="service_unavailable", code=code)
    for path in ("/version", "/openapi.json"):
        assert http.get(path).status_code == 200


def test_requests_while_loading_are_a_503() -> None:
    async def start() -> None:
        return None

    with served(start) as loading, loading.http() as http:
        check_phase(http, "loading")
        loading.on_loop(lambda: loading.state.start(FakeEngine(answer_length=1)))
        assert http.get("/health").json() == {"status": "ready"}
        assert http.post(POSTS[1], json=BODIES[POSTS[1]]).status_code == 200


def test_requests_while_draining_or_dead_are_a_503(scripted: Served[FakeEngine]) -> None:
    with scripted.http() as http:
        check_draining_and_dead(scripted, http)


def check_draining_and_dead(scripted: Served[FakeEngine], http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ready"}
    scripted.state.drain()
    check_phase(http, "draining")
    with scripted.openai() as client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="fake", prompt="x")
    assert caught.value.status_code == 503

    async def until_told(counter: int) -> bool:
        return scripted.server.should_exit

    scripted.server.on_tick = until_told  # type: ignore[method-assign]  # else death stops it
    scripted.engine.failure = RuntimeError("the device is gone")
    check_phase(http, "dead")


# -- faults of ours -------------------------------------------------------------------------------


def break_encoding(scripted: Served[FakeEngine]) -> None:
    async def fail(*_: object, **__: object) -> list[int]:
        raise RuntimeError("with a secret")

    scripted.engine.encode = fail  # type: ignore[method-assign]


def logged_error(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The only one; it is written once the answer has been sent."""
    wait_until(lambda: any(record.levelno >= logging.ERROR for record in caplog.records))
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return record


def test_an_unexpected_error_is_a_500_with_its_trace_only_in_the_log(
    scripted: Served[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    break_encoding(scripted)
    for path in ("/v1/completions", "/tokenize"):
        caplog.clear()
        with caplog.at_level(logging.INFO), scripted.http() as http:
            response = http.post(path, json=BODIES[path], headers={"x-request-id": "req-17"})
        message = check_error(response, 500, type="internal_error")
        assert "secret" not in message
        record = logged_error(caplog)
        assert "req-17" in record.getMessage()
        assert "test_server_errors.py" in record.getMessage()  # the stack, without the words
    with scripted.http() as http:
        assert http.get("/health").status_code == 200


# -- ids ------------------------------------------------------------------------------------------


def test_every_answer_has_a_request_id(scripted: Served[FakeEngine]) -> None:
    with scripted.http() as http:
        check_ids(scripted, http)


def check_ids(scripted: Served[FakeEngine], http: httpx.Client) -> None:
    stream = {**BODIES[POSTS[0]], "stream": True}
    responses = [
        http.get("/health"),
        http.get("/nowhere"),
        http.get(POSTS[0]),
        http.post(POSTS[0], json=BODIES[POSTS[0]]),
        http.post(POSTS[0], json=stream),
        http.post(POSTS[0], json={}),
        http.post(POSTS[0], content=b"{", headers=JSON),
        http.post(POSTS[1], json={"prompt": "x" * 50}),
        http.post(POSTS[1], json={"prompt": "x", "n": 3}),
        http.post(POSTS[1], content=b" " * (MAX_BODY_BYTES + 1), headers=JSON),
    ]
    break_encoding(scripted)
    responses.append(http.post(POSTS[1], json=BODIES[POSTS[1]]))
    scripted.state.drain()
    responses.append(http.get("/health"))
    ids = [response.headers.get_list("x-request-id") for response in responses]
    assert all(len(found) == 1 and len(found[0]) == 32 for found in ids)
    assert len({found[0] for found in ids}) == len(ids)
    statuses = [response.status_code for response in responses]
    assert statuses == [200, 404, 405, 200, 200, 400, 400, 400, 200, 413, 500, 503]


def test_preflights_and_key_errors_have_a_request_id() -> None:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=1)

    with served(start, api_key=("k",), cors_origin=("*",)) as found, found.http() as http:
        asked = {"origin": "https://a.org", "access-control-request-method": "POST"}
        preflight = http.options(POSTS[0], headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["x-request-id"]
        refused = http.get("/v1/models", headers={"origin": "https://a.org"})
        assert refused.status_code == 401
        assert refused.headers["x-request-id"]
        assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_the_request_id_of_the_client_is_used(scripted: Served[FakeEngine]) -> None:
    own = "trace/01:ab_c.d-e=="
    with scripted.openai() as client:
        asked: dict[str, Any] = {"model": "fake", "messages": HELLO}
        answer = client.chat.completions.create(**asked, extra_headers={"X-Request-ID": own})
        assert answer._request_id == own
        assert own in answer.id
        made = client.chat.completions.create(**asked)
        assert made.id == f"chatcmpl-{made._request_id}"
    assert [stream.request_id for stream in scripted.engine.submitted] == [
        f"{answer.id}-0",
        f"{made.id}-0",
    ]


@pytest.mark.parametrize("own", ["", "a b", "x" * 129, "ü", 'a"b', "<script>", "a\tb"])
def test_an_unsafe_request_id_is_replaced(http: httpx.Client, own: str) -> None:
    response = http.get("/version", headers={"x-request-id": own.encode()})
    assert len(response.headers["x-request-id"]) == 32


def test_concurrent_requests_may_share_a_request_id(scripted: Served[FakeEngine]) -> None:
    def ask(_: int) -> httpx.Response:
        with scripted.http() as http:
            return http.post(POSTS[1], json={"prompt": "x"}, headers={"x-request-id": "same"})

    scripted.on_loop(scripted.engine.gate.clear)
    with ThreadPoolExecutor(8) as threads:
        asking = threads.map(ask, range(8))
        while scripted.on_loop(lambda: len(scripted.engine.running)) < 8:
            pass
        scripted.on_loop(scripted.engine.gate.set)
        responses = [*asking]
    assert all(response.status_code == 200 for response in responses)
    assert {response.headers["x-request-id"] for response in responses} == {"same"}
    assert len({response.json()["id"] for response in responses}) == 8
