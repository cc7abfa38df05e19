"""Answers of the Messages API, checked as clients and its description have them."""

from __future__ import annotations

import functools
import json
from typing import Any

import anthropic.types
import jiter
import jsonschema
from pydantic import TypeAdapter

from minisgl.server.endpoints import ENDPOINTS
from minisgl.server.openapi import describe

EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
BLOCKS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}


@functools.cache
def validator(name: str) -> Any:
    """Validates by a component of /openapi.json."""
    description = describe(ENDPOINTS, with_key=False)
    schema = {"$ref": f"#/components/schemas/{name}", "components": description["components"]}
    return jsonschema.Draft202012Validator(schema)


def checked_message(body: Any) -> dict[str, Any]:
    """A whole answer that both the SDK and our description take."""
    anthropic.types.Message.model_validate(body)
    validator("MessageAnswer").validate(body)
    return dict(body)


def checked_error(body: Any) -> dict[str, str]:
    """The error in an envelope of Anthropic's form."""
    validator("MessagesError").validate(body)
    assert [*body] == ["type", "error", "request_id"]
    if body["error"]["type"] != "request_too_large":  # documented, and not in the SDK
        anthropic.types.ErrorResponse.model_validate(body)
    return dict(body["error"])


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its name."""
    events = []
    assert text.endswith("\n\n")
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events must come in order. What has come of an input that is
    no object is in `_raw`."""
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    first, second, *body, delta, last = events
    message = first["message"]
    assert first["type"] == "message_start" and second == {"type": "ping"}
    checked_message(message)
    assert message["content"] == [] and message["stop_reason"] is None
    blocks: list[dict[str, Any]] = message["content"]
    texts: list[str] = []
    is_open = False
    for event in body:
        assert event["index"] == len(blocks) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, texts = True, []
            blocks.append(event["content_block"])
            assert not any(blocks[-1].get(name) for name in ("text", "thinking", "input"))
            continue
        assert is_open
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = parsed_input("".join(texts))
            else:
                block[block["type"]] = "".join(texts)
                assert block.get("signature") != ""
            continue
        assert event["type"] == "content_block_delta"
        kind = event["delta"]["type"]
        if kind == "signature_delta":
            block["signature"] = event["delta"]["signature"]
        else:
            assert event["delta"][DELTAS[kind]] and block["type"] == BLOCKS[kind]
            texts.append(event["delta"][DELTAS[kind]])
            if kind == "input_json_delta":  # as the client parses it at each piece
                assert isinstance(jiter.from_json("".join(texts).encode(), partial_mode=True), dict)
    assert not is_open and blocks
    assert (delta["type"], last) == ("message_delta", {"type": "message_stop"})
    assert message["usage"]["input_tokens"] == delta["usage"]["input_tokens"]
    return checked_message({**message, **delta["delta"], "usage": delta["usage"]})


def parsed_input(arguments: str) -> Any:
    """What a whole answer has of arguments."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=int)  # which refuses NaN
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_raw": arguments}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its ids, which differ from request to request."""
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": content}
