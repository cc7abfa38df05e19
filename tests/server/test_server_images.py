"""Images become a text where that is asked for, and documents of plain text are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.scripted_engine import ScriptedEngine, qwen
from support.serving import Served, served

from minisgl.server.requests.chat_messages import IMAGE_TEXT

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DATA = "data:image/png;base64,AA=="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
IMAGE_URL = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": DATA, "detail": "auto"}
IMAGE = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "The data."}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def with_result(image: dict[str, Any]) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "user", "content": [text("See:"), image]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [image, text("seen")]},
    ]


def in_messages(*blocks: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [*blocks, text("seen")]}
    conversation = [
        {"role": "user", "content": [text("See:"), *blocks]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return {"messages": conversation}


ITEMS = [
    {"role": "user", "content": [text("See:", "input_text"), INPUT_IMAGE]},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "1",
        "output": [INPUT_IMAGE, text("seen", "input_text")],
    },
]
CASES = [
    (CHAT, {"messages": with_result(IMAGE_URL)}, ""),
    (RESPONSES, {"input": ITEMS}, ""),
    (MESSAGES, in_messages(IMAGE), ""),
]
cases = pytest.mark.parametrize(("path", "body", "gap"), CASES, ids=["chat", "resp", "messages"])


def server_of(**options: Any) -> Any:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(qwen())

    return served(start, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    with server_of() as found:
        yield found


@pytest.fixture(scope="module")
def placing_server() -> Iterator[Served[ScriptedEngine]]:
    with server_of(images="placeholder") as found:
        yield found


def ask(server: Served[ScriptedEngine], path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http() as http:
        return http.post(path, json={"model": "fake", **body})


def prompt_of(server: Served[ScriptedEngine], path: str, body: dict[str, Any]) -> str:
    answer = ask(server, path, body)
    assert answer.status_code == 200, answer.text
    return server.engine.texts[-1]


@cases
def test_an_image_becomes_a_text_that_says_so(
    server: Served[ScriptedEngine],
    placing_server: Served[ScriptedEngine],
    path: str,
    body: dict[str, Any],
    gap: str,
) -> None:
    asked = prompt_of(server, path, {**body, "images": "placeholder"})
    assert f"\nSee:{gap}{IMAGE_TEXT}<|im_end|>" in asked
    assert f"<tool_response>{IMAGE_TEXT}{gap}seen</tool_response>" in asked
    assert "AA==" not in asked
    assert prompt_of(placing_server, path, body) == asked


@cases
def test_an_image_is_refused_by_name_otherwise(
    server: Served[ScriptedEngine],
    placing_server: Served[ScriptedEngine],
    path: str,
    body: dict[str, Any],
    gap: str,
) -> None:
    for answer in (
        ask(server, path, body),
        ask(placing_server, path, {**body, "images": "refuse"}),
    ):
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "type: cannot be an image, because this model takes text only;" in message
        assert 'images: "placeholder"' in message
    answer = ask(server, path, {**body, "images": "look"})
    assert answer.status_code == 400 and "images" in answer.json()["error"]["message"]


def test_counting_and_tokenizing_take_images_likewise(server: Served[ScriptedEngine]) -> None:
    placed = {"images": "placeholder"}
    prompt_of(server, MESSAGES, {**in_messages(IMAGE), **placed})
    counted = ask(server, f"{MESSAGES}/count_tokens", {**in_messages(IMAGE), **placed})
    assert counted.json() == {"input_tokens": len(server.engine.streams[-1].prompt)}
    prompt_of(server, CHAT, {"messages": with_result(IMAGE_URL), **placed})
    tokenized = ask(server, "/tokenize", {"messages": with_result(IMAGE_URL), **placed})
    assert tokenized.json()["tokens"] == list(server.engine.streams[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"source": PLAIN}, "The data."),
        (
            {
                "source": PLAIN,
                "title": "A title",
                "context": "Old",
                "citations": {"enabled": True},
                "cache_control": {"type": "ephemeral"},
            },
            "A title\nOld\nThe data.",
        ),
        ({"source": PLAIN, "title": None, "context": None, "citations": None}, "The data."),
        ({"source": {"type": "content", "content": "Said."}}, "Said."),
        ({"source": {"type": "content", "content": [text("a"), text("b")]}}, "a\n\nb"),
    ],
)
def test_documents_of_plain_text_are_read(
    server: Served[ScriptedEngine], fields: dict[str, Any], shown: str
) -> None:
    prompt = prompt_of(server, MESSAGES, in_messages({"type": "document", **fields}))
    assert f"See:\n\n{shown}<|im_end|>" in prompt
    assert f"<tool_response>{shown}\n\nseen</tool_response>" in prompt


def test_images_inside_of_documents_and_other_documents_are_named(
    server: Served[ScriptedEngine],
) -> None:
    parts = {"type": "content", "content": [text("a"), IMAGE]}
    body = in_messages({"type": "document", "source": parts})
    message = ask(server, MESSAGES, body).json()["error"]["message"]
    assert message.startswith("messages.0.content.1.source.content.1.type: cannot be an image")
    assert f"a{IMAGE_TEXT}" in prompt_of(server, MESSAGES, {**body, "images": "placeholder"})
    for kind in ("base64", "url", "file"):
        body = in_messages({"type": "document", "source": {"type": kind}})
        answer = ask(server, MESSAGES, {**body, "images": "placeholder"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith(f"messages.0.content.1.source.type: cannot be '{kind}'")
