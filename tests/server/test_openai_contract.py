"""What `openai` clients rely on: lengths, finish reasons, usage, ids and refusals by name."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import FakeEngine
from support.serving import Served, demo_engine, served

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.text.tokenizer import Tokenizer

HELLO: Any = [{"role": "user", "content": "Hello!"}]
SUM: Any = [{"role": "user", "content": "What is 17 + 25?"}]
MAX_SEQ_LEN = 128


@pytest.fixture(scope="module")
def demo() -> Iterator[Served[AsyncEngine]]:
    with served(lambda: demo_engine(max_seq_len_override=MAX_SEQ_LEN)) as found:
        yield found


@pytest.fixture(scope="module")
def client(demo: Served[AsyncEngine]) -> Iterator[openai.OpenAI]:
    with demo.openai() as found:
        yield found


@pytest.fixture(scope="module")
def http(demo: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    with demo.http() as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(demo: Served[AsyncEngine]) -> Tokenizer:
    assert demo.engine.tokenizer is not None
    return demo.engine.tokenizer


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_with_both_lengths(
    http: httpx.Client, tokenizer: Tokenizer, stream: bool
) -> None:
    """The answer is an error at once, not a stream that breaks off."""
    messages: Any = [{"role": "user", "content": "Hello! " * 200}]
    length = len(tokenizer.chat(messages))
    response = http.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(length) in error["message"] and str(MAX_SEQ_LEN) in error["message"]
    for fields, param in (({"input": messages}, "input"), ({"input": "Hi"}, "max_output_tokens")):
        asked = {**fields, "stream": stream, "max_output_tokens": MAX_SEQ_LEN}
        response = http.post("/v1/responses", json=asked)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param and str(MAX_SEQ_LEN) in error["message"]


def test_a_long_prompt_is_read_whole_or_refused(client: openai.OpenAI) -> None:
    """A prompt that just fits is read from first to last token; one token more is refused."""
    ids = [5] * (MAX_SEQ_LEN - 1)
    answer = client.completions.create(model="demo", prompt=ids, echo=True, logprobs=0)
    scored = answer.choices[0].logprobs
    assert answer.usage is not None and scored is not None and scored.tokens is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert len(scored.tokens) == MAX_SEQ_LEN
    with pytest.raises(openai.BadRequestError, match="128 tokens"):
        client.completions.create(model="demo", prompt=[*ids, 5])


def test_max_tokens_beyond_the_context_is_refused_or_clamped_by_option(
    client: openai.OpenAI,
) -> None:
    """--clamp-max-tokens reduces max_tokens to the remaining context."""
    asked: dict[str, Any] = {"model": "demo", "prompt": [5] * 100, "max_tokens": 29}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    assert "100" in str(caught.value) and "29" in str(caught.value)
    assert client.completions.create(**{**asked, "max_tokens": 28}).choices

    with (
        served(lambda: demo_engine(max_seq_len_override=MAX_SEQ_LEN), clamp_max_tokens=True) as lax,
        lax.openai() as lax_client,
    ):
        answer = lax_client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.total_tokens == MAX_SEQ_LEN
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_finish_reason_and_usage_are_right(
    http: httpx.Client, tokenizer: Tokenizer, stream: bool
) -> None:
    """Both finish reasons occur, and the counts equal those of the tokenizer."""
    cases: list[tuple[dict[str, Any], str, str | int | None]] = [
        ({}, "stop", tokenizer.eos_token_id),
        ({"stop": " ="}, "stop", " ="),
        ({"max_tokens": 3}, "length", None),
        ({"max_tokens": 3, "ignore_eos": True}, "length", None),
    ]
    for fields, reason, matched in cases:
        body = {"messages": SUM, "temperature": 0, "logprobs": True, "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = read(http.post("/v1/chat/completions", json=body), stream)
        assert (answer["finish_reason"], answer["matched_stop"]) == (reason, matched)
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.chat(SUM))
        # The token that ended it counts, and is not in the content.
        num_output = len(answer["tokens"]) + (reason == "stop")
        assert answer["usage"]["completion_tokens"] == num_output
        assert answer["usage"]["total_tokens"] == len(tokenizer.chat(SUM)) + num_output


def read(response: httpx.Response, stream: bool) -> dict[str, Any]:
    """The finish reason, usage and tokens of an answer, streamed or not."""
    assert response.status_code == 200
    if not stream:
        body = response.json()
        (choice,) = body["choices"]
        return {
            "finish_reason": choice["finish_reason"],
            "matched_stop": choice.get("matched_stop"),
            "usage": body["usage"],
            "tokens": choice["logprobs"]["content"],
        }
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert len(ends) == 1 and not any(
        "matched_stop" in each for each in choices if each not in ends
    )
    scored = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    tokens = [*itertools.chain(*scored)]
    return {
        "finish_reason": ends[0]["finish_reason"],
        "matched_stop": ends[0].get("matched_stop"),
        "usage": last["usage"],
        "tokens": tokens,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_completion_names_what_has_ended_it(
    http: httpx.Client, tokenizer: Tokenizer, stream: bool
) -> None:
    prompt = tokenizer.chat(SUM)
    for fields, matched in (({}, tokenizer.eos_token_id), ({"stop": ["x", " ="]}, " =")):
        body = {"prompt": prompt, "max_tokens": 50, "temperature": 0, "stream": stream, **fields}
        response = http.post("/v1/completions", json=body)
        data = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
        assert json.loads(data)["choices"][0]["matched_stop"] == matched


def test_answers_have_id_object_model_and_created(client: openai.OpenAI) -> None:
    before = int(time.time())
    chat = client.chat.completions.create(model="demo", messages=HELLO)
    text = client.completions.create(model="demo", prompt="Hello")
    chunks = [*client.chat.completions.create(model="demo", messages=HELLO, stream=True)]
    assert (chat.object, text.object) == ("chat.completion", "text_completion")
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chat.id.startswith("chatcmpl-") and text.id.startswith("cmpl-")
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chat.id, text.id, chunks[0].id}) == 3
    for answer in (chat, text, *chunks):
        assert answer.model == "demo"
        assert before <= answer.created <= time.time()
        assert re.fullmatch("fp_[0-9a-f]{10}", answer.system_fingerprint or "")
        assert answer.system_fingerprint == chat.system_fingerprint


def test_the_fingerprint_tells_setups_and_models_apart() -> None:
    one, other = FakeEngine(), FakeEngine()
    other.model_name = "other"
    states = [
        EngineState(ServerConfig(port=port), engine, EngineConfig(**options))
        for port, engine, options in [
            (0, one, {"dtype": "bfloat16"}),
            (1, one, {"dtype": "bfloat16", "num_pages": 9}),
            (0, one, {"dtype": "float32"}),
            (0, other, {"dtype": "bfloat16"}),
        ]
    ]
    first, *same, third, fourth = [state.fingerprint for state in states]
    assert same == [first] and len({first, third, fourth}) == 3


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_answers_are_one_json_object_unless_streaming_is_requested(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    """One JSON object is the default."""
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        response = http.post(path, json={**body, **fields})
        assert response.headers["content-type"] == "application/json"
        assert response.json()["choices"]
        streamed = http.post(path, json={**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")


def test_stop_n_model_and_penalties_take_effect(client: openai.OpenAI) -> None:
    """test_server_fields.py covers every other field."""

    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(model="demo", messages=SUM, **fields)

    plain = ask(temperature=0).choices[0].message.content
    assert plain == "17 + 25 = 42."
    assert ask(temperature=0, stop="=").choices[0].message.content == "17 + 25 "
    assert ask(temperature=0, stop=["="]).choices[0].message.content == "17 + 25 "
    assert len(ask(temperature=0, n=3).choices) == 3
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=SUM)
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    without = client.completions.create(model="demo", prompt="I I I I I", **asked)
    for name in ("presence_penalty", "frequency_penalty"):
        penalized = client.completions.create(
            model="demo", prompt="I I I I I", **{name: 2.0}, **asked
        )
        assert penalized.choices[0].text != without.choices[0].text


def test_temperature_0_is_greedy_whatever_seed_and_top_p(client: openai.OpenAI) -> None:
    """Temperature 0 selects the likeliest token each time, whatever the other fields."""
    answers = {
        client.chat.completions.create(
            model="demo", messages=SUM, temperature=temperature, seed=seed, top_p=top_p
        )
        .choices[0]
        .message.content
        for temperature in (0, 1e-10)
        for seed in (1, 2)
        for top_p in (0.1, 1)
    }
    assert answers == {"17 + 25 = 42."}


def test_tools_and_tool_calls_are_refused_by_name(tmp_path: Path) -> None:
    """By a model whose template does not show them: in the request and in the history."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result: Any = {"role": "tool", "tool_call_id": "1", "content": "x"}
    engine = partial(demo_engine, num_pages=16, chat_template=str(template))
    with served(engine) as found, found.openai() as client:
        create = partial(client.chat.completions.create, model="demo")
        for fields, param in (
            ({"messages": HELLO, "tools": [tool]}, "tools"),
            ({"messages": history}, "messages.1.tool_calls"),
            ({"messages": [result]}, "messages.0.role"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create(**fields)
            assert caught.value.param == param


def test_the_openai_client_lists_models_chats_streams_and_completes(client: openai.OpenAI) -> None:
    """Every method of the client that the server supports."""
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    chat = client.chat.completions.create(model=model.id, messages=SUM, temperature=0)
    assert chat.choices[0].message.content == "17 + 25 = 42."
    with client.chat.completions.stream(model=model.id, messages=SUM, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "17 + 25 = 42."
    text = client.completions.create(model=model.id, prompt="Hello", max_tokens=2)
    assert text.usage is not None and text.usage.completion_tokens <= 2
