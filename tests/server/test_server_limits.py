"""Bodies that are expensive to process are refused in bounded time."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine import FakeEngine
from support.serving import Served, served

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.server.answers.jobs import MAX_SCORES
from minisgl.server.apis.responses.request_types import ResponsesRequest
from minisgl.server.http.bodies import MAX_VALUES
from minisgl.server.http.decoding import MAX_COMMAS, decode
from minisgl.server.requests.chat_messages import MAX_MESSAGES, MAX_PARTS, MAX_TEMPLATE_OPTIONS
from minisgl.server.requests.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl.server.requests.templating import template_messages

MAX_SEQ_LEN = 1000
# A search that backtracks takes minutes, and what is done here some milliseconds.
GENEROUS_SECONDS = 30


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served[FakeEngine]]:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=2, max_seq_len=MAX_SEQ_LEN, max_queued=2000)

    with served(start) as found:
        yield found


@pytest.fixture(scope="module")
def http(scripted: Served[FakeEngine]) -> Iterator[httpx.Client]:
    with scripted.http() as client:
        yield client


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "a", **fields}


# -- what the decoder quotes ----------------------------------------------------------------------

LONG = "field ` " * 150_000
QUOTING: list[dict[str, Any]] = [
    {"messages": [message(role=LONG)]},
    {"messages": [message(role=LONG + " - at `$" + LONG)]},
    {"messages": [message(content=[{"type": LONG}])]},
    {"messages": [message()], LONG: 1},
    {"messages": [message()], LONG + " - at `$." + "a." * 40_000: 1},
    {"messages": [message()], "reasoning_effort": "Expected `" + "a |" * 40_000},
    {"messages": [message()], "chat_template_kwargs": LONG},
]


@pytest.mark.parametrize("body", QUOTING)
def test_error_messages_for_huge_values_take_constant_time(body: dict[str, Any]) -> None:
    started = time.thread_time()
    with pytest.raises(CallerError) as caught:
        decode(json.dumps(body).encode(), ChatRequest, strict=True)
    assert time.thread_time() - started < GENEROUS_SECONDS
    assert len(str(caught.value)) < 2000
    assert len(caught.value.param or "") < 1000


# -- objects with the client's keys ---------------------------------------------------------------


@pytest.mark.parametrize("step", [2**61 - 1, 1 << 32])
def test_colliding_keys_of_logit_bias_are_refused(step: int) -> None:
    """Integers that are multiples of Python's modulus have one hash, and make a table a list."""
    bias = {str(step * index): 1 for index in range(40_000)}
    with pytest.raises(InvalidRequestError) as caught:
        decode(json.dumps({"prompt": "a", "logit_bias": bias}).encode(), CompletionRequest)
    assert str(caught.value) == "logit_bias: must have at most 1024 keys."


def test_a_repeated_key_of_logit_bias_is_refused() -> None:
    again = b",".join([b'"5": 1'] * 40_000)
    body = decode(b'{"prompt": "a", "logit_bias": {%s, "5": 2}}' % again, CompletionRequest)
    assert body.sampling_fields()["logit_bias"] == {5: 2}  # the last one holds, as in any JSON


# -- numbers that take long to read ----------------------------------------------------------------


def listed(value: bytes, num: int = MAX_VALUES - 100) -> bytes:
    return b"[%s]" % b",".join([value] * num)


def seconds(body: bytes, kind: type[msgspec.Struct]) -> float:
    """CPU seconds of this thread to decode or refuse the body; the better of two runs."""
    best = math.inf
    for _ in range(2):
        started = time.thread_time()
        with contextlib.suppress(CallerError):
            decode(body, kind)
        best = min(best, time.thread_time() - started)
    return best


@pytest.fixture(scope="module")
def plain_seconds() -> float:
    """CPU seconds to decode the largest valid list of token ids."""
    return seconds(b'{"prompt": %s}' % listed(b"12345"), CompletionRequest)


@pytest.mark.parametrize("number", [b"1e308", b"1e-308", b"1e-330", b"5.0", b"[5.0]"])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, b'{"prompt": %s}'),
        (CompletionRequest, b'{"prompt": "a", "n": 1.0, "stop_token_ids": %s}'),
        (DetokenizeRequest, b'{"tokens": %s}'),
        (CompletionRequest, b'{"prompt": "a", "top_k": 1.0, "metadata": %s}'),
        (CompletionRequest, b'{"prompt": "a", "top_k": 1.0, "user": {"a": %s}}'),
        (CompletionRequest, b'{"prompt": "a", "mirostat": 0, "mirostat_tau": %s}'),
        (CompletionRequest, b'{"prompt": "a", "top_k": 1.0, "unknown": %s}'),
        (CompletionRequest, b'{"prompt": "a", "top_k": 1.0, "logit_bias": {"1": %s}}'),
        (
            ChatRequest,
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}',
        ),
    ],
)
def test_thousands_of_slow_floats_decode_in_bounded_time(
    kind: type[msgspec.Struct], body: bytes, number: bytes, plain_seconds: float
) -> None:
    """The decoder takes 10 us for 1e308, a hundred times as long as for a token id."""
    hostile = body % listed(number, MAX_VALUES // (2 if b"[" in number else 1) - 100)
    assert seconds(hostile, kind) < 15 * plain_seconds


def test_integers_of_thousands_of_digits_decode_in_bounded_time(plain_seconds: float) -> None:
    digits = listed(b"9" * 4290, 3900)
    for field in (b'"prompt": %s', b'"prompt": "a", "top_k": 1.0, "metadata": %s'):
        assert seconds(b"{%s}" % (field % digits), CompletionRequest) < 15 * plain_seconds


def test_half_a_million_unknown_keys_decode_in_bounded_time(plain_seconds: float) -> None:
    keys = b",".join(b'"k%d":1' % index for index in range(MAX_VALUES - 100))
    body = b'{"prompt": "a", "top_k": 1.0, %s}' % keys
    assert decode(body, CompletionRequest).top_k == 1
    assert seconds(body, CompletionRequest) < 15 * plain_seconds


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest, TokenizeRequest])
def test_far_too_many_template_options_are_refused_before_they_are_decoded(
    kind: type[msgspec.Struct], plain_seconds: float
) -> None:
    few = b",".join(b'"k%d":1' % index for index in range(MAX_COMMAS))
    many = b",".join(b'"k%d":1' % index for index in range(260_000))
    said = b'[{"role": "user", "content": "a"}]'
    field = b"input" if kind is ResponsesRequest else b"messages"
    body = b'{"chat_template_kwargs": {%%s}, "%b": %b}' % (field, said)
    for keys, limit in ((few, f"{MAX_TEMPLATE_OPTIONS} keys"), (many, f"{MAX_COMMAS} commas")):
        with pytest.raises(InvalidRequestError, match=limit) as caught:
            decode(body % keys, kind)
        assert caught.value.param == "chat_template_kwargs"
    began, plain = time.thread_time(), seconds(body % b"", kind)
    with pytest.raises(InvalidRequestError):
        decode(body % many, kind)
    assert time.thread_time() - began - plain < plain_seconds


def test_prompts_with_floats_are_accepted_up_to_a_size() -> None:
    floats = listed(b"12345.0", 50_000)
    assert decode(b'{"prompt": %s}' % floats, CompletionRequest).prompt == [12345] * 50_000
    with pytest.raises(InvalidRequestError) as caught:
        decode(b'{"prompt": %s}' % listed(b"12345.0", 100_000), CompletionRequest)
    assert caught.value.param == "prompt.0"
    # What has none is not concerned.
    ids = b'{"prompt": %s, "top_k": 1.0}' % listed(b"12345", 100_000)
    assert decode(ids, CompletionRequest).prompt == [12345] * 100_000


# -- conversations --------------------------------------------------------------------------------


def test_the_numbers_of_messages_and_parts_are_limited(http: httpx.Client) -> None:
    part = {"type": "text", "text": ""}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = refusal(http, path, {"messages": [message()] * (MAX_MESSAGES + 1)})
        assert error["message"] == f"messages: must have at most {MAX_MESSAGES} entries."
        parts = message(content=[part] * (MAX_PARTS // 2 + 1))
        error = refusal(http, path, {"messages": [parts, parts]})
        assert error["message"] == f"messages: must have at most {MAX_PARTS} content parts in all."


def test_the_longest_allowed_conversations_are_accepted() -> None:
    content = [{"type": "text", "text": "a"}]
    body = {"messages": [message(content=content * (MAX_PARTS // MAX_MESSAGES))] * MAX_MESSAGES}
    decoded = decode(json.dumps(body).encode(), ChatRequest)
    assert len(template_messages(decoded)) == MAX_MESSAGES


def test_the_number_of_template_options_is_limited(http: httpx.Client) -> None:
    options = {f"o{index}": index for index in range(MAX_TEMPLATE_OPTIONS + 1)}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [message()], "chat_template_kwargs": options}
        error = refusal(http, path, body)
        expected = f"chat_template_kwargs: must have at most {MAX_TEMPLATE_OPTIONS} keys."
        assert error["message"] == expected
        del options["o0"]
        assert http.post(path, json=body).status_code == 200
        options["o0"] = 0


# -- logprobs -------------------------------------------------------------------------------------


def test_the_number_of_logprobs_of_an_answer_is_limited(
    scripted: Served[FakeEngine], http: httpx.Client
) -> None:
    prompts = ["x" * 900] * 1000
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 0, "echo": True}
    error = refusal(http, "/v1/completions", {**asked, "logprobs": 20})
    assert error["param"] == "logprobs"
    assert str(MAX_SCORES) in error["message"] and str(900 * 1000 * 21) in error["message"]
    error = refusal(
        http, "/v1/completions", {"prompt": "x", "n": 128, "max_tokens": 900, "logprobs": 20}
    )
    assert f"max_tokens of 128 choices may be up to {MAX_SCORES // (128 * 21)}." in error["message"]
    error = refusal(
        http,
        "/v1/chat/completions",
        {
            "messages": [message()],
            "n": 128,
            "max_tokens": 900,
            "logprobs": True,
            "top_logprobs": 20,
        },
    )
    assert error["param"] == "logprobs"
    assert not scripted.engine.running
    # What exceeds the context too is told so first.
    asked = {"prompt": "x", "n": 128, "max_tokens": 5000, "logprobs": 20}
    assert refusal(http, "/v1/completions", asked)["code"] == "context_length_exceeded"


def test_max_tokens_of_a_scored_chat_defaults_to_the_logprobs_limit(
    scripted: Served[FakeEngine], http: httpx.Client
) -> None:
    asked: dict[str, Any] = {"messages": [message()], "logprobs": True, "top_logprobs": 20}
    for n, expected in ((1, None), (128, MAX_SCORES // (128 * 21))):
        scripted.engine.submitted.clear()
        assert http.post("/v1/chat/completions", json={**asked, "n": n}).status_code == 200
        assert {stream.params.max_tokens for stream in scripted.engine.submitted} == {expected}
    scripted.engine.submitted.clear()
