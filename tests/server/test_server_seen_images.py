"""Images of requests reach the engine in their places, and what is wrong with one has a name."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from support.seeing_engine import (
    HALF_SEEING_TEMPLATE,
    NUM_ROWS,
    PAD,
    SeeingEngine,
    seeing_engine,
)
from support.serving import Served, served

from minisgl.request import Tenant
from minisgl.server.http.bodies import MAX_BODY_BYTES
from minisgl.server.requests.chat_messages import IMAGE_TEXT

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RED, BLUE = b"the bytes of a red image", b"the bytes of a blue image"
ELSEWHERE = "https://example.org/image.png"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def image_url(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def block(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": source}


def in_base64(data: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT_MESSAGES: Any = [
    {"role": "user", "content": [text("a"), image_url(data_url(RED)), text("b"), text("c")]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [image_url(data_url(BLUE), detail="low"), text("d")],
    },
    {"role": "user", "content": [image_url(ELSEWHERE, detail="high")]},
]
ITEMS: Any = [
    {
        "role": "user",
        "content": [
            text("a", "input_text"),
            {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
            text("bc", "input_text"),
        ],
    },
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": [
            {"type": "input_image", "image_url": data_url(BLUE), "detail": "low"},
            text("d", "input_text"),
        ],
    },
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": ELSEWHERE, "detail": "high"}],
    },
]
BLOCKS: Any = [
    {"role": "user", "content": [text("a"), block(in_base64(RED)), text("bc")]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "call_1",
                "content": [block(in_base64(BLUE)), text("d")],
            },
            block({"type": "url", "url": ELSEWHERE}),
        ],
    },
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served[SeeingEngine]]:
    with served(seeing_engine) as found:
        yield found


def check(engine: SeeingEngine, *, low: bool = True) -> int:
    """What the engine was asked last, which is each of the conversations above. Returns the number
    of tokens."""
    found = engine.sources[-1]
    assert [source.data or source.url for source in found] == [RED, BLUE, ELSEWHERE]
    assert [source.is_low for source in found] == [False, low, False]
    rendered = engine.texts[-1]
    assert f"user\na{PAD}bc<|im_end|>" in rendered
    assert f"<tool_response>{PAD}d</tool_response>" in rendered
    assert f"user\n{PAD}<|im_end|>" in rendered
    prompt = engine.streams[-1].prompt
    assert sum(token < 0 for token in prompt) == 3 * NUM_ROWS
    return len(prompt)


def test_a_chat_has_images_between_its_texts(server: Served[SeeingEngine]) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(model="fake", messages=CHAT_MESSAGES)
    count = check(server.engine)
    assert answer.usage and answer.usage.prompt_tokens == count
    with server.http() as http:
        body = {"messages": CHAT_MESSAGES, "return_token_strs": True}
        counted = http.post("/tokenize", json=body).json()
        found = http.post("/detokenize", json={"tokens": counted["tokens"]}).json()
    assert counted["count"] == len(counted["tokens"]) == count
    assert counted["token_strs"].count(PAD) == 3 * NUM_ROWS
    assert found["prompt"].count(PAD) == 3 * NUM_ROWS


def test_reasoning_and_calls_follow_images(server: Served[SeeingEngine]) -> None:
    """The call is the only answer that the mask of required tools allows."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "red"}}\n</tool_call>'
    server.engine.answers = [f"<think>\nIt is red.\n</think>\n\n{call}"]
    parameters = {"type": "object", "properties": {"at": {"enum": ["red", "blue"]}}}
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    try:
        with server.openai() as client:
            answer = client.chat.completions.create(
                model="fake", messages=CHAT_MESSAGES, tools=[tool], tool_choice="required"
            )
        message: Any = answer.choices[0].message
        assert message.tool_calls[0].function.arguments == '{"at": "red"}'
        assert message.reasoning_content.strip() == "It is red."
        check(server.engine)
    finally:
        server.engine.answers = [""]


def test_a_response_has_images_also_in_the_outputs_of_calls(server: Served[SeeingEngine]) -> None:
    with server.openai() as client:
        answer = client.responses.create(model="fake", input=ITEMS)
        assert answer.usage and answer.usage.input_tokens == check(server.engine)
        client.responses.create(model="fake", input="And?", previous_response_id=answer.id)
    # They are kept with the items that have them.
    assert [source.data for source in server.engine.sources[-1]] == [RED, BLUE, b""]
    assert f"a{PAD}bc" in server.engine.texts[-1]


def test_a_message_has_images_also_in_the_results_of_tools(server: Served[SeeingEngine]) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        answer = client.messages.create(model="fake", max_tokens=9, messages=BLOCKS)
        count = check(server.engine, low=False)
        assert answer.usage.input_tokens == count
        assert client.messages.count_tokens(model="fake", messages=BLOCKS).input_tokens == count


def post(server: Served[SeeingEngine], path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http() as http:
        return http.post(path, json=body)


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": [*parts]}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **fields}]}]}


AT = "messages.1.content.1.image_url"
RED_URL = image_url(data_url(RED))
WITH_RED = said(RED_URL)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, said(*[RED_URL] * 17), "messages", "17 images; allowed: 16"),
    (CHAT, said(text("x"), image_url("data:image/png;base64,AB=C")), AT, "not valid base64"),
    (CHAT, said(text("x"), image_url("data:image/png;base64,ÄÄÄÄ")), AT, "not valid base64"),
    (CHAT, said(text("x"), image_url("data:image/png;base64,")), AT, "empty"),
    (CHAT, said(text("x"), image_url(data_url(b"x", "text/plain"))), AT, "media type"),
    (CHAT, said(text("x"), image_url("data:image/png,AAAA")), AT, "not in base64"),
    (CHAT, said(text("x"), image_url("file:///etc/passwd")), AT, "address"),
    (CHAT, said(text("x"), image_url("/etc/passwd")), AT, "address"),
    (CHAT, said(text("x"), image_url("")), AT, "address"),
    (CHAT, said(text("x"), {"type": "image_url"}), AT, "address"),
    (CHAT, said({"type": "image_url", "image_url": "x"}), "messages.1.content.0.image_url", "obj"),
    (CHAT, said(image_url("x", detail="best")), "messages.1.content.0.image_url.detail", "auto"),
    (CHAT, said({"type": "image", "image": "/etc/passwd"}), "messages.1.content.0.type", "image"),
    (CHAT, said({"type": "input_audio"}), "messages.1.content.0.type", "sounds"),
    (CHAT, said({"type": "video_url"}), "messages.1.content.0.type", "videos"),
    (CHAT, said({"type": "file"}), "messages.1.content.0.type", "files"),
    (CHAT, said(RED_URL, role="system"), "messages.1.content.0.type", "messages of the user"),
    (CHAT, said(RED_URL, role="developer"), "messages.1.content.0.type", "messages of the user"),
    (CHAT, said(RED_URL, role="assistant"), "messages.1.content.0.type", "messages of the user"),
    (CHAT, {**WITH_RED, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "with images"),
    (CHAT, {**WITH_RED, "add_special_tokens": True}, "add_special_tokens", "with images"),
    ("/tokenize", {**WITH_RED, "add_special_tokens": True}, "add_special_tokens", "with images"),
    (RESPONSES, item(file_id="file-1"), "input[0].content[0].file_id", "address"),
    (RESPONSES, item(image_url="file:///x"), "input[0].content[0].image_url", "address"),
    (RESPONSES, item(image_url="x", detail="best"), "input[0].content[0].detail", "auto"),
    (RESPONSES, {"input": [{**ITEMS[0], "role": "system"}]}, "input[0].content[1].type", "user"),
    (MESSAGES, said(block({"type": "file", "file_id": "x"})), "messages.1.content.0.source", "add"),
    (
        MESSAGES,
        said(block({"type": "base64", "data": "AA=="})),
        "messages.1.content.0.source",
        "me",
    ),
    (MESSAGES, said(block({"type": "url", "url": "x"})), "messages.1.content.0.source", "address"),
    (MESSAGES, {**said(text("x")), "system": [block(in_base64(RED))]}, "system.0.type", "image"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        "messages.0.content.0.tool_use_id",
        "call",
    ),
    ("/v1/completions", {"prompt": [RED_URL]}, "prompt.0", "must be"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED)
def test_what_is_wrong_with_an_image_has_the_name_of_its_field(
    server: Served[SeeingEngine], path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = post(server, path, {"max_tokens": 5, **body} if path == MESSAGES else body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path != MESSAGES:
        assert error["param"] == param, error
    assert error["message"].startswith(param) and words in error["message"], error


def test_a_template_that_leaves_an_image_out_is_an_error(server: Served[SeeingEngine]) -> None:
    async def half_seeing() -> SeeingEngine:
        return SeeingEngine(HALF_SEEING_TEMPLATE)

    with served(half_seeing) as other:
        for path, body in (
            (CHAT, {"messages": CHAT_MESSAGES}),
            (RESPONSES, {"input": ITEMS}),
            (MESSAGES, {"messages": BLOCKS, "max_tokens": 5}),
        ):
            answer = post(other, path, body)
            assert answer.status_code == 400 and "placeholders" in answer.text
        assert other.engine.streams == []


def test_a_server_can_refuse_images_that_its_model_sees(server: Served[SeeingEngine]) -> None:
    for option in ("refuse", "placeholder"):
        with served(seeing_engine, images=option) as other:
            answer = post(other, CHAT, WITH_RED)
            assert (answer.status_code == 400) == (option == "refuse")
            assert ("this server refuses them" in answer.text) == (option == "refuse")
            seen = post(other, CHAT, {**WITH_RED, "images": "see"}).status_code == 200
            assert seen == (option == "placeholder"), "a request decides for the server"
            with other.http() as http:
                [model] = http.get("/v1/models").json()["data"]
            assert model["input_modalities"] == ["text"]
    answer = post(server, CHAT, {**WITH_RED, "images": "placeholder"})
    assert answer.status_code == 200 and IMAGE_TEXT in server.engine.texts[-1]
    with server.http() as http:
        [model] = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


def test_images_are_shared_by_those_who_share_prefixes() -> None:
    with served(seeing_engine, api_key=("one", "two")) as other, other.http() as http:
        engine = other.engine

        def namespace(path: str, key: str, **body: Any) -> bytes:
            headers = {"authorization": f"Bearer {key}"}
            answer = http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return engine.namespaces[-1]

        shared, max_tokens = {"messages": CHAT_MESSAGES}, {"max_tokens": 5}
        found = set()
        for key in ("one", "two"):
            for salt in ({}, {"cache_salt": "a"}, {"extra_key": "b"}):
                of_chats = namespace(CHAT, key, **shared, **salt)
                assert of_chats == engine.prefix_namespaces[-1]
                found.add(of_chats)
                given = {"input": ITEMS, "truncation": "auto", **salt}
                assert namespace(RESPONSES, key, **given) == of_chats
                assert {*engine.namespaces[-2:]} == {of_chats}
            of_key = namespace(CHAT, key, **shared)
            assert namespace(MESSAGES, key, messages=BLOCKS, **max_tokens) == of_key
            assert namespace("/v1/messages/count_tokens", key, messages=BLOCKS) == of_key
            assert namespace("/tokenize", key, **shared) == of_key
        assert len(found) == 6


def test_images_wait_in_the_line_of_those_who_ask() -> None:
    with served(seeing_engine, api_key=("one", "two")) as other, other.http() as http:
        engine, found = other.engine, set()
        for key in ("one", "two"):
            for path, fields in (
                (CHAT, {"messages": CHAT_MESSAGES, "user": "ada"}),
                (CHAT, {"messages": CHAT_MESSAGES, "user": "bob"}),
                (RESPONSES, {"input": ITEMS, "user": "ada", "truncation": "auto"}),
                (MESSAGES, {"messages": BLOCKS, "metadata": {"user_id": "ada"}, "max_tokens": 5}),
            ):
                headers = {"authorization": f"Bearer {key}"}
                assert http.post(path, json=fields, headers=headers).status_code == 200
                assert engine.tenants[-1] == engine.submitted_by[-1]
                found.add(engine.tenants[-1])
            tokenized = http.post("/tokenize", json={"messages": CHAT_MESSAGES}, headers=headers)
            assert tokenized.status_code == 200
            assert engine.tenants[-1] == Tenant(engine.submitted_by[-1].client)
        assert len(found) == 4


def test_a_body_may_be_as_large_as_any_other(server: Served[SeeingEngine]) -> None:
    image = bytes(MAX_BODY_BYTES * 3 // 4 - 3000)
    assert post(server, CHAT, said(image_url(data_url(image)))).status_code == 200
    assert server.engine.sources[-1][0].data == image
    assert post(server, CHAT, said(image_url(data_url(image + bytes(3000))))).status_code == 413


def test_answers_report_prompts_in_ids_of_the_vocabulary(server: Served[SeeingEngine]) -> None:
    engine = server.engine
    engine.answers = ["An answer."]
    body = {**WITH_RED, "return_token_ids": True, "logprobs": True, "echo": True}
    for choice in ({}, {"n": 2}):
        answer = post(server, CHAT, {**body, **choice}).json()
        ids = answer["prompt_token_ids"]
        assert min(ids) >= 0 and ids.count(engine.pad) == NUM_ROWS
        assert len(ids) == answer["usage"]["prompt_tokens"]
        assert answer["choices"][0]["message"]["content"].endswith("An answer.")


def test_the_log_has_nothing_of_images(
    server: Served[SeeingEngine], caplog: pytest.LogCaptureFixture
) -> None:
    secret = b64encode(b"a secret of nobody").decode()
    with caplog.at_level(logging.DEBUG):
        for url in (
            f"data:image/png;base64,{secret}",
            f"data:image/x{secret};base64,{secret}",
            secret,
        ):
            for path, body in (
                (CHAT, said(image_url(url))),
                (RESPONSES, item(image_url=url)),
                (MESSAGES, {**said(block({"type": "url", "url": url})), "max_tokens": 5}),
                (CHAT, said(image_url("x", detail=secret))),
            ):
                post(server, path, body)
    assert secret not in caplog.text and secret[:10] not in caplog.text
