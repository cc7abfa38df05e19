"""/tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.serving import Served, demo_engine, served

from minisgl.engine import AsyncEngine
from minisgl.text.tokenizer import Tokenizer

HELLO: Any = [{"role": "user", "content": "Hello, you! 👍🏽"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[Served[AsyncEngine]]:
    with served(lambda: demo_engine(max_seq_len_override=256)) as found:
        yield found


@pytest.fixture(scope="module")
def http(demo: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    with demo.http() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(demo: Served[AsyncEngine]) -> Tokenizer:
    assert demo.engine.tokenizer is not None
    return demo.engine.tokenizer


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


TEXTS = ["Hello", "", "ünïcödé 👨‍👩‍👧", "a " * 20_000, "<|im_start|>user"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_survives_tokenize_and_detokenize(
    http: httpx.Client, tokenizer: Tokenizer, text: str
) -> None:
    found = post(http, "/tokenize", model="demo", prompt=text)
    ids = tokenizer.encode(text)
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 256, "token_strs": None}
    assert post(http, "/detokenize", model="demo", tokens=ids) == {"prompt": text}
    shown = post(http, "/tokenize", prompt=text, return_token_strs=True)
    assert shown["token_strs"] == [tokenizer.token_text(id) for id in ids]
    plain = post(http, "/tokenize", prompt=text, add_special_tokens=False)
    assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)


def test_a_conversation_is_tokenized_like_a_chat_prompt(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    found = post(http, "/tokenize", messages=HELLO)
    assert found["tokens"] == tokenizer.chat(HELLO)
    without = post(http, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert without["tokens"] == tokenizer.chat(HELLO, add_generation_prompt=False)
    assert without["count"] < found["count"]
    answer = post(http, "/v1/chat/completions", messages=HELLO, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == found["count"]
    text = post(http, "/detokenize", tokens=found["tokens"])["prompt"]
    assert text.startswith("<|im_start|>user\nHello, you!")
    as_prompt = post(http, "/v1/completions", prompt=found["tokens"], max_tokens=1)
    assert as_prompt["choices"][0]["text"] == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "messages"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "tools": {}}, "tools"),
        (
            {
                "messages": HELLO,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ],
)
def test_invalid_tokenize_requests_are_refused(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = http.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": ["a"]}, "tokens.0"),
        ({"tokens": [1, -1]}, "tokens.1"),
        ({"tokens": [2**31]}, "tokens.0"),
        ({"tokens": [1, 2048]}, "tokens"),
    ],
)
def test_invalid_detokenize_requests_are_refused(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = http.post("/detokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_detokenize_accepts_many_tokens_and_none(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, you!") * 10_000
    assert post(http, "/detokenize", tokens=ids)["prompt"] == "Hello, you!" * 10_000
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}
    every = [*range(2048)]
    assert post(http, "/detokenize", tokens=every)["prompt"] == tokenizer.decode(
        every, skip_special_tokens=False
    )
