"""No message of a conversation is dropped: it is in the prompt, or the request is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.scripted_engine import QWEN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, served

# What templates do with system messages.
ONLY_FIRST = (
    "{% set others = messages[1:] | rejectattr('role', 'equalto', 'system') | list %}"
    "{% set messages = messages[:1] + others %}"
)
ONLY_LAST = (
    "{% set said = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{% set messages = said[-1:] + messages | rejectattr('role', 'equalto', 'system') | list %}"
)
NONE = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
CALL_ID, OTHER_ID = "call_abc", "call_xyz"


@contextlib.contextmanager
def conversing(template: str) -> Iterator[tuple[Served[ScriptedEngine], httpx.Client]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(qwen(template))

    with served(start) as server, server.http() as http:
        server.engine.answers = ["Yes."]
        yield server, http


def system(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


QUESTION = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "I."}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("template", [ONLY_FIRST, ONLY_LAST], ids=["first", "last"])
@pytest.mark.parametrize("api", PATHS)
def test_instructions_that_the_template_would_drop_are_in_the_prompt(
    api: str, template: str, role: str
) -> None:
    late = [QUESTION, SAID, system("system" if api == "messages" else role, "Be kind."), QUESTION]
    bodies = [{"messages": late, "system": "Be brief.", "max_tokens": 9}]
    if api != "messages":
        chats = [[system("system", "Be brief."), *late]]
        chats.append([system("system", "Be brief."), system(role, "Be kind."), QUESTION])
        field = "messages" if api == "chat" else "input"
        bodies = [{field: chat} for chat in chats]
    with conversing(template + QWEN_TEMPLATE) as (server, http):
        for body in bodies:
            answer = http.post(PATHS[api], json={"model": "fake", **body})
            assert answer.status_code == 200, answer.text
            text = server.engine.texts[-1]
            assert text.count("Be brief.") == text.count("Be kind.") == 1
            assert text.startswith("<|im_start|>system\nBe brief.")


def test_instructions_stay_where_they_are_if_the_template_takes_them_there() -> None:
    messages = [system("system", "A"), system("system", "B"), QUESTION, SAID, system("system", "C")]
    with conversing(QWEN_TEMPLATE) as (server, http):
        body = {"model": "fake", "messages": [*messages, QUESTION]}
        assert http.post(PATHS["chat"], json=body).status_code == 200
        turns = [part.strip() for part in server.engine.texts[-1].split("<|im_start|>")[1:]]
        assert [turn for turn in turns if turn.startswith("system")] == [
            f"system\n{text}<|im_end|>" for text in "ABC"
        ]


IN_QUESTION = (  # instructions are in the prompt where a question is
    "{% if messages | length == 1 and messages[0].role == 'system' %}{% set messages = [] %}"
    "{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_without_a_question_are_in_the_prompt(role: str) -> None:
    with conversing(IN_QUESTION + QWEN_TEMPLATE) as (server, http):
        body = {"model": "fake", "messages": [system(role, "Be brief.")]}
        assert http.post(PATHS["chat"], json=body).status_code == 200
        assert "Be brief." in server.engine.texts[-1]


@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        ("chat", {"messages": [system("system", "Be brief."), QUESTION]}, "messages.0.role"),
        ("responses", {"input": [QUESTION], "instructions": "Be brief."}, "instructions"),
        ("messages", {"messages": [QUESTION], "system": "Be brief.", "max_tokens": 9}, "system"),
    ],
)
def test_instructions_that_the_template_never_takes_are_refused(
    api: str, body: dict[str, Any], field: str
) -> None:
    with conversing(NONE + QWEN_TEMPLATE) as (_, http):
        answer = http.post(PATHS[api], json={"model": "fake", **body})
        assert answer.status_code == 400
        assert field in answer.text and "leaves the system's messages out" in answer.text


def chat_with(*ids: str, between: bool) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    call = {"id": CALL_ID, "type": "function", "function": function}
    results = [{"role": "tool", "tool_call_id": id, "content": "a cat"} for id in ids]
    others = [QUESTION] if between else []
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [QUESTION, called, *others, *results]}


def responses_with(*ids: str, between: bool) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}"}
    results = [{"type": "function_call_output", "call_id": id, "output": "a cat"} for id in ids]
    return {"input": [QUESTION, call, *([QUESTION] if between else []), *results]}


def messages_with(*ids: str, between: bool) -> dict[str, Any]:
    call = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}
    results = [{"type": "tool_result", "tool_use_id": id, "content": "a cat"} for id in ids]
    others = [QUESTION, SAID] if between else []
    called = [QUESTION, {"role": "assistant", "content": [call]}, *others]
    return {"messages": [*called, {"role": "user", "content": results}], "max_tokens": 9}


WITH_RESULTS = {"chat": chat_with, "responses": responses_with, "messages": messages_with}


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Served[ScriptedEngine], httpx.Client]]:
    with conversing(QWEN_TEMPLATE) as found:
        yield found


@pytest.mark.parametrize(
    ("api", "ids", "between", "field"),
    [
        ("chat", [OTHER_ID], False, "messages.2.tool_call_id"),
        ("chat", [CALL_ID, OTHER_ID], False, "messages.3.tool_call_id"),
        ("chat", [CALL_ID], True, "messages.3.tool_call_id"),
        ("responses", [OTHER_ID], False, "input[2].call_id"),
        ("responses", [CALL_ID], True, "input[3].call_id"),
        ("messages", [OTHER_ID], False, "messages.2.content.0.tool_use_id"),
        ("messages", [CALL_ID, OTHER_ID], False, "messages.2.content.1.tool_use_id"),
        ("messages", [CALL_ID], True, "messages.4.content.0.tool_use_id"),
    ],
)
def test_a_result_without_its_call_right_before_it_is_named(
    plain: tuple[Served[ScriptedEngine], httpx.Client],
    api: str,
    ids: list[str],
    between: bool,
    field: str,
) -> None:
    _, http = plain
    body = {"model": "fake", **WITH_RESULTS[api](*ids, between=between)}
    answer = http.post(PATHS[api], json=body)
    assert answer.status_code == 400 and f"{field}: is the id of" in answer.text
    assert ("no call" in answer.text) is (OTHER_ID in ids)


@pytest.mark.parametrize("api", PATHS)
def test_results_right_behind_their_calls_are_taken(
    plain: tuple[Served[ScriptedEngine], httpx.Client], api: str
) -> None:
    server, http = plain
    body = {"model": "fake", **WITH_RESULTS[api](CALL_ID, between=False)}
    answer = http.post(PATHS[api], json=body)
    assert answer.status_code == 200, answer.text
    assert "<tool_response>a cat</tool_response>" in server.engine.texts[-1]


def test_messages_that_are_kept_elsewhere_cannot_be_gone_on_with(
    plain: tuple[Served[ScriptedEngine], httpx.Client],
) -> None:
    _, http = plain
    body = {"model": "fake", "max_tokens": 9, "messages": [QUESTION]}
    create = {"thread": {"type": "create"}}
    assert http.post(PATHS["messages"], json=body | create).status_code == 200
    goes_on = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    answer = http.post(PATHS["messages"], json=body | goes_on)
    details = {"error_code": "thread_unsupported_request"}
    assert answer.status_code == 400 and answer.json()["error"]["details"] == details
