"""The keys of requests: prompts as clients write them, without a tokenizer."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from minisgl.router.route_keys import CACHED_PATHS, RESPONSES, holder_of, route_key
from minisgl.router.table import BLOCK_BYTES, MAX_KEY_BYTES

SYSTEM = "You are a helpful assistant."
FIRST = {"role": "user", "content": 'What is "the capital" of France?'}
ANSWER = {"role": "assistant", "content": "Paris.\n"}
SECOND = {"role": "user", "content": "And of Spain?"}
NAMED = "Name the capital of France"


def key(path: str, body: Any, client: str = "") -> bytes:
    found = route_key(path, json.dumps(body).encode(), client)
    assert found is not None
    return found


def num_common(one: bytes, other: bytes) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/chat/completions", "messages", {"tools": [{"type": "function"}], "stream": True}),
        ("/v1/messages", "messages", {"system": [{"type": "text", "text": SYSTEM}]}),
        ("/v1/responses", "input", {"instructions": SYSTEM, "store": False}),
    ],
)
def test_the_next_request_of_a_conversation_begins_with_the_last(
    path: str, field: str, more: dict[str, Any]
) -> None:
    first = key(path, {**more, field: [FIRST]})
    # The end of the list and of the message may be written differently.
    next_one = key(path, {field: [FIRST, ANSWER, SECOND], **more})
    assert num_common(first, next_one) >= len(first) - 2
    assert b"capital" in first
    another = key(path, {**more, field: [{**FIRST, "content": "Something else."}]})
    assert num_common(first, another) < len(first) - len(FIRST["content"])


def image(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def block(data: bytes) -> dict[str, Any]:
    spelled = b64encode(data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": spelled},
    }


@pytest.mark.parametrize(
    ("path", "part"), [("/v1/chat/completions", image), ("/v1/messages", block)]
)
@pytest.mark.parametrize("size", [600, 3 * MAX_KEY_BYTES])
def test_an_image_counts_by_its_digest_so_that_what_follows_it_counts_as_well(
    path: str, part: Callable[[bytes], dict[str, Any]], size: int
) -> None:
    def said(data: bytes, text: str, *more: dict[str, Any]) -> bytes:
        content = [part(data), {"type": "text", "text": text}]
        return key(path, {"messages": [{"role": "user", "content": content}, *more]})

    red, blue = bytes(size), b"x" + bytes(size)
    first, later = said(red, NAMED), said(red, NAMED, ANSWER, SECOND)
    assert len(later) < 1000
    assert num_common(first, later) >= len(first) - 5
    assert num_common(first, said(red, "Something else.")) >= len(first) - len(NAMED) - 5
    assert num_common(first, said(blue, NAMED)) < len(first) - len(NAMED) - BLOCK_BYTES
    # Also beside an image that another request has before it.
    both = key(path, {"messages": [{"role": "user", "content": [part(red), part(blue)]}]})
    assert num_common(first, both) > BLOCK_BYTES and len(both) < 1000


def test_a_long_text_beside_an_image_is_no_image() -> None:
    text = "\u4f60\u597d" * 1000
    content = [image(bytes(9)), {"type": "text", "text": text}]
    found = key("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert len(found) > 12 * len(text) // 2


@pytest.mark.parametrize("prompt", [NAMED, [NAMED, "x"], [70, 71, 72, 73, 74, 75]])
def test_prompts_that_begin_alike_have_keys_that_begin_alike(prompt: Any) -> None:
    longer = f"{prompt} and more" if isinstance(prompt, str) else [*prompt, prompt[0]]
    first = key("/v1/completions", {"prompt": prompt, "max_tokens": 7})
    assert num_common(first, key("/v1/completions", {"prompt": longer})) >= len(first) - 1


def test_what_all_chats_have_in_common_is_less_than_what_counts() -> None:
    path = "/v1/chat/completions"
    system = {"role": "system", "content": SYSTEM}
    one = key(path, {"messages": [system, FIRST]})
    assert num_common(one, key(path, {"messages": [system, SECOND]})) < BLOCK_BYTES
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert key(path, {"messages": [parts]}).count(b"text") == 0


def test_clients_and_salts_have_caches_of_their_own() -> None:
    body = {"messages": [FIRST]}
    keys = {
        key("/v1/messages", body),
        key("/v1/messages", body, client="0"),
        key("/v1/messages", {**body, "cache_salt": "0"}),
        key("/v1/messages", {**body, "extra_key": "1"}),
    }
    assert len(keys) == 4
    assert max(num_common(one, other) for one in keys for other in keys if one != other) < 3


def test_adapters_have_caches_of_their_own_and_long_names_are_no_prefix_in_common() -> None:
    path, names = "/v1/chat/completions", (f"{'long/' * 20}base", f"{'long/' * 20}adapter", None)
    first = {**FIRST, "content": FIRST["content"] * 5}
    keys = [key(path, {"model": name, "messages": [first]}) for name in names]
    assert max(num_common(*pair) for pair in combinations(keys, 2)) < BLOCK_BYTES
    another = key(path, {"messages": [SECOND], "model": names[0]})
    assert num_common(keys[0], another) < BLOCK_BYTES
    longer = key(path, {"messages": [first, ANSWER, SECOND], "model": names[0]})
    assert num_common(keys[0], longer) >= len(keys[0]) - 2


def test_the_line_of_claude_code_that_changes_with_each_request_is_left_out() -> None:
    def of(number: int) -> bytes:
        nonce = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [nonce, {"type": "text", "text": SYSTEM}]
        return key("/v1/messages", {"system": system, "messages": [FIRST]})

    assert of(1) == of(2) and b"helpful" in of(1)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"messages":' + b"[" * 10_000])
@pytest.mark.parametrize("path", sorted(CACHED_PATHS))
def test_a_body_that_is_no_request_has_no_key(path: str, body: bytes) -> None:
    assert route_key(path, body, "") is None


def test_requests_that_leave_nothing_in_the_cache_have_no_key() -> None:
    assert route_key("/tokenize", json.dumps({"prompt": NAMED}).encode(), "") is None


RANDOM = "0123456789abcdef" * 2
ITEM = {"type": "item_reference", "id": f"msg_{RANDOM}01-2"}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input": "x"}, ""),
        ({"input": "x", "previous_response_id": f"resp_{RANDOM}-3"}, "3"),
        ({"input": [ITEM], "previous_response_id": f"resp_{RANDOM}-3"}, "3"),
        ({"input": "x", "previous_response_id": f"resp_{RANDOM}"}, ""),
        ({"input": "x", "previous_response_id": 3}, ""),
        ({"input": [FIRST, ITEM, SECOND]}, "2"),
        ({"input": [FIRST, {"id": ITEM["id"]}]}, "2"),
        # An item itself, which needs no replica.
        ({"input": [{**ANSWER, "type": "message", "id": ITEM["id"]}]}, ""),
        ({"input": [{**ANSWER, "id": ITEM["id"]}]}, ""),
    ],
)
def test_what_a_request_goes_on_from_names_the_replica_that_has_it(
    body: dict[str, Any], name: str
) -> None:
    content = json.dumps(body).encode()
    assert holder_of(RESPONSES, content) == name
    assert holder_of("/v1/chat/completions", content) == ""


def test_the_path_of_a_response_names_the_replica_that_has_it() -> None:
    assert holder_of(f"{RESPONSES}/resp_{RANDOM}-12", b"") == "12"
    assert holder_of(f"{RESPONSES}/resp_{RANDOM}-12/cancel", b"") == "12"
    assert holder_of(f"{RESPONSES}/resp_1", b"") == ""
    assert holder_of("/v1/models", b"") == ""
