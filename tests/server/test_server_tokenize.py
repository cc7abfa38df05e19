"""/tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http_server import http_client
from support.scripted_engine import IM, ScriptedEngine, qwen
from support.serving import Served, demo_engine, served
from tokenizers.processors import TemplateProcessing

from minisgl.engine import AsyncEngine
from minisgl.models.hub import DEMO_FOLDER
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


async def test_special_tokens_are_put_around_a_conversation_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = qwen()  # which other tests have, too
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in IM)
    around = TemplateProcessing(
        single=f"{IM[0]} $A {IM[1]}", special_tokens=[(IM[0], *first), (IM[1], *last)]
    )
    monkeypatch.setattr(tokenizer._backend, "post_processor", around)
    assert tokenizer.special_around() == (first, last)
    engine = ScriptedEngine(tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    async with http_client(engine) as client:

        async def ids(**fields: Any) -> Any:
            found = await client.post("/tokenize", json={"messages": messages, **fields})
            tokens = found.json()["tokens"]
            body = {"messages": messages, "max_tokens": 1, **fields}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert engine.streams[-1].prompt == tokens
            return tokens

        plain = await ids()
        assert await ids(add_special_tokens=False) == plain
        assert await ids(add_special_tokens=True) == [*first, *plain, *last]
    await engine.close()


def test_the_tokenizer_is_described_without_files(http: httpx.Client, tokenizer: Tokenizer) -> None:
    response = http.get("/tokenizer_info")
    found = response.json()
    config = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    assert found["chat_template"] == tokenizer.chat_template_text
    assert found["eos_token"]["content"] == config["eos_token"] == "<|im_end|>"
    assert found["added_tokens_decoder"][str(tokenizer.eos_token_id)]["special"] is True
    assert found["model_max_length"] == config["model_max_length"]
    assert found["tokenizer_class"] and str(DEMO_FOLDER) not in response.text
    assert "name_or_path" not in found and "pad_token" in found


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
