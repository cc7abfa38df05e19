"""Chats with a model of the harmony format, on an engine with given answers, in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.harmony_chat import gpt_oss
from support.scripted_engine import ScriptedEngine
from support.serving import Served, served
from support.tool_cases import CLOCK, QUESTION, WEATHER, Answer, streamed_answers, whole_answer

FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, 2 < 3.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
CALL = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "CET"}'
IN_ROLE = ' to=functions.clock<|channel|>commentary json<|message|>{"zone": "CET"}'
ARGUMENTS = '{"zone": "CET"}'
STRICT: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
NUMBER: Any = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
AS_NUMBER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "number", "schema": NUMBER, "strict": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(gpt_oss())

    with served(start) as found:
        yield found


def create(server: Served[ScriptedEngine], answer: str, *, run: int = 1, **fields: Any) -> Any:
    server.engine.answers, server.engine.run = [answer], run
    request: dict[str, Any] = {"model": "fake", "messages": QUESTION, **fields}
    with server.openai() as client:
        found: Any = client.chat.completions.create(**request)
        return [*found] if fields.get("stream") else found


def ask(server: Served[ScriptedEngine], answer: str, **fields: Any) -> Answer:
    """The answer, whole and streamed in several runs of tokens, which must be the same."""
    whole = whole_answer(create(server, answer, **fields).choices[0])
    for run in (1, 3, 1000):
        [streamed] = streamed_answers(create(server, answer, run=run, stream=True, **fields))
        assert (streamed.content or "") == (whole.content or "")
        assert (streamed.reasoning, streamed.made) == (whole.reasoning, whole.made)
        assert (streamed.finish_reason, streamed.logprobs) == (whole.finish_reason, whole.logprobs)
    return whole


@pytest.mark.parametrize(
    ("answer", "fields", "reasoning", "content"),
    [
        (THOUGHT + FINAL + "Yes.", {}, "Hm, 2 < 3.", "Yes."),
        (FINAL + "Yes.", {}, None, "Yes."),
        (THOUGHT + PREAMBLE + FINAL + "Yes.", {}, "Hm, 2 < 3.", "I look.\n\nYes."),
        (THOUGHT + FINAL + "Yes. No.", {"stop": ["."]}, "Hm, 2 < 3.", "Yes"),
        (THOUGHT + FINAL + "Yes.", {"extra_body": {"include_reasoning": False}}, None, "Yes."),
        (THOUGHT + FINAL + "Yes.", {"extra_body": {"separate_reasoning": False}}, None,
         "Hm, 2 < 3.\n\nYes."),
    ],
)  # fmt: skip
def test_channels_are_members_of_the_message(
    server: Served[ScriptedEngine],
    answer: str,
    fields: dict[str, Any],
    reasoning: str | None,
    content: str,
) -> None:
    found = ask(server, answer, **fields)
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize("call", [CALL, IN_ROLE])
@pytest.mark.parametrize(
    ("before", "reasoning", "content"),
    [
        ("", None, None),
        (THOUGHT, "Hm, 2 < 3.", None),
        (THOUGHT + PREAMBLE, "Hm, 2 < 3.", "I look."),
    ],
)
def test_calls_are_messages_to_functions(
    server: Served[ScriptedEngine],
    call: str,
    before: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    found = ask(server, before + call, tools=[WEATHER, CLOCK])
    assert found.made == [("clock", ARGUMENTS)]
    assert (found.reasoning, found.content) == (reasoning, content)
    assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_call_that_must_be_made_follows_the_thought(
    server: Served[ScriptedEngine], thought: str, choice: Any
) -> None:
    fields: Any = {"tools": [WEATHER, STRICT], "tool_choice": choice}
    found = ask(server, thought + CALL, **fields)
    assert (found.made, found.content) == ([("clock", ARGUMENTS)], None)
    for wrong in (FINAL + "No.", CALL.replace("CET", "GMT"), PREAMBLE + CALL, "No."):
        with pytest.raises(openai.BadRequestError):
            create(server, thought + wrong, **fields)


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_strict_tools_hold_calls_and_leave_the_text_free(
    server: Served[ScriptedEngine], thought: str
) -> None:
    for answer in (CALL, PREAMBLE + CALL, PREAMBLE + PREAMBLE + CALL):
        assert ask(server, thought + answer, tools=[STRICT]).made == [("clock", ARGUMENTS)]
    assert ask(server, thought + FINAL + "{No}.", tools=[STRICT]).content == "{No}."
    with pytest.raises(openai.BadRequestError):
        create(server, thought + PREAMBLE + CALL.replace("CET", "GMT"), tools=[STRICT])


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_structured_output_is_that_of_the_final_channel(
    server: Served[ScriptedEngine], thought: str
) -> None:
    found = ask(server, thought + FINAL + '{"n": 3}', response_format=AS_NUMBER)
    assert found.content == '{"n": 3}'
    for wrong in (FINAL + '{"n": "3"}', PREAMBLE + FINAL + '{"n": 3}', '{"n": 3}', CALL):
        with pytest.raises(openai.BadRequestError):
            create(server, thought + wrong, response_format=AS_NUMBER)
    # Or calls of tools that are offered.
    both: Any = {"response_format": AS_NUMBER, "tools": [STRICT]}
    assert ask(server, thought + CALL, **both).made == [("clock", ARGUMENTS)]
    assert ask(server, thought + FINAL + '{"n": 3}', **both).content == '{"n": 3}'
    with pytest.raises(openai.BadRequestError):
        create(server, thought + FINAL + "3", **both)


def test_a_thought_cannot_leave_its_message_where_an_answer_is_held(
    server: Served[ScriptedEngine],
) -> None:
    """Otherwise what follows were shown, and held to nothing."""
    thought = THOUGHT.removesuffix(NEXT)
    for way_out in (FINAL, f"<|start|>assistant{FINAL}", f"<|return|><|start|>assistant{FINAL}"):
        with pytest.raises(openai.BadRequestError):
            create(server, f'{thought}{way_out}{{"n": 3}}', response_format=AS_NUMBER)


def test_the_budget_ends_the_analysis(server: Served[ScriptedEngine]) -> None:
    fields: Any = {"extra_body": {"thinking_token_budget": 3}}
    short = THOUGHT.replace("Hm, 2 < 3.", "Hm,")
    assert ask(server, short + FINAL + "Yes.", **fields).reasoning == "Hm,"
    with pytest.raises(openai.BadRequestError):
        create(server, THOUGHT + FINAL + "Yes.", **fields)


def test_a_schema_that_cannot_be_enforced_is_named(server: Served[ScriptedEngine]) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/no"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, FINAL, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_message_that_is_continued_is_content_from_the_first_token(
    server: Served[ScriptedEngine],
) -> None:
    fields: Any = {
        "messages": [*QUESTION, {"role": "assistant", "content": '{"n"'}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    assert ask(server, ": 3}", **fields).content == ": 3}"
    assert server.engine.texts[-1].endswith(f'assistant{FINAL}{{"n"')
    held = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 3}}}
    fields["messages"] = [*QUESTION, {"role": "assistant", "content": "It is "}]
    assert ask(server, "3", **fields, response_format=held, logprobs=True).logprobs == ["3"]


def test_logprobs_are_those_of_the_content(server: Served[ScriptedEngine]) -> None:
    """Whatever of a header is like the beginning of the content."""
    for thought in ("", THOUGHT, THOUGHT.replace("Hm", "final a")):
        found = ask(server, thought + FINAL + "a final answer", logprobs=True)
        assert "".join(found.logprobs) == "a final answer"
    found = ask(server, THOUGHT + PREAMBLE + CALL, tools=[CLOCK], logprobs=True)
    assert "".join(found.logprobs) == "I look."


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"extra_body": {"reasoning": {"enabled": False}}}, "low"),
        ({"extra_body": {"chat_template_kwargs": {"reasoning_effort": "huge"}}}, "huge"),
    ],
)
def test_the_effort_is_one_that_the_model_knows(
    server: Served[ScriptedEngine], fields: dict[str, Any], effort: str
) -> None:
    create(server, FINAL, **fields)
    assert f"Reasoning: {effort}<|end|>" in server.engine.texts[-1]


def test_built_in_tools_are_refused_by_name(server: Served[ScriptedEngine]) -> None:
    for given in (["python"], ["browser", "python"]):
        with pytest.raises(
            openai.BadRequestError, match="browser and python, are not run"
        ) as caught:
            create(server, FINAL, extra_body={"chat_template_kwargs": {"builtin_tools": given}})
        assert caught.value.param == "chat_template_kwargs"
    create(server, FINAL, extra_body={"chat_template_kwargs": {"builtin_tools": []}})


def called(name: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": f'{{"zone": "{name}"}}'}
    return {"id": call_id, "type": "function", "function": function}


def shown_call(name: str, result: str) -> str:
    return (
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
        f'{{"zone": "{name}"}}<|call|><|start|>functions.{name} to=assistant<|channel|>commentary'
        f'<|message|>"{result}"<|end|>'
    )


def test_the_history_has_reasoning_and_calls_where_the_template_takes_them(
    server: Served[ScriptedEngine],
) -> None:
    said = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [called("clock", "a")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "12:00"}
    create(server, FINAL, messages=[*QUESTION, said, result], tools=[CLOCK])
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    assert server.engine.texts[-1].endswith(
        thought + shown_call("clock", "12:00") + "<|start|>assistant"
    )
    # The template takes one text beside calls.
    create(server, FINAL, messages=[*QUESTION, {**said, "content": "I look."}, result])
    assert thought.replace("Hm.", "Hm.\n\nI look.") in server.engine.texts[-1]


def test_several_calls_of_a_message_become_messages(server: Served[ScriptedEngine]) -> None:
    calls = [called("clock", "a"), called("other", "b")]
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    create(server, FINAL, messages=[*QUESTION, said, *results, *QUESTION], tools=[CLOCK])
    shown = shown_call("clock", "first") + shown_call("other", "second")
    assert shown in server.engine.texts[-1]


def test_the_responses_api_has_items_of_all_channels(server: Served[ScriptedEngine]) -> None:
    server.engine.answers, server.engine.run = [THOUGHT + PREAMBLE + CALL], 2
    request: dict[str, Any] = {
        "model": "fake",
        "input": "What time is it?",
        "tools": [{"type": "function", "name": "clock", "parameters": None, "strict": False}],
        "reasoning": {"effort": "high"},
    }
    with server.openai() as client:
        whole: Any = client.responses.create(**request)
        events: Any = [*client.responses.create(**request, stream=True)]
    assert "Reasoning: high" in server.engine.texts[-1]
    for response in (whole, events[-1].response):
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call"]
        reasoning, message, call = response.output
        assert reasoning.content[0].text == "Hm, 2 < 3."
        assert message.content[0].text == "I look."
        assert (call.name, call.arguments) == ("clock", ARGUMENTS)
    # The items and the result of the call go back.
    server.engine.answers = [FINAL + "Noon."]
    items: list[Any] = [item.model_dump(exclude_none=True) for item in whole.output]
    result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "12:00"}
    given = [{"role": "user", "content": "What time is it?"}, *items, result]
    with server.openai() as client:
        assert client.responses.create(**{**request, "input": given}).output_text == "Noon."
    assert "<|channel|>analysis<|message|>Hm, 2 < 3.\n\nI look.<|end|>" in server.engine.texts[-1]
    assert (
        'functions.clock to=assistant<|channel|>commentary<|message|>"12:00"'
        in (server.engine.texts[-1])
    )


def test_the_messages_api_has_blocks_of_all_channels(server: Served[ScriptedEngine]) -> None:
    server.engine.answers, server.engine.run = [THOUGHT + PREAMBLE + CALL], 2
    body: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 1000,
        "messages": QUESTION,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "clock", "input_schema": {"type": "object"}}],
    }
    with server.http() as client:
        answer = client.post("/v1/messages", json=body).json()
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm, 2 < 3.", "I look.")
    assert (call["name"], call["input"]) == ("clock", json.loads(ARGUMENTS))
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "12:00"}
    body["messages"] = [
        *QUESTION,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    server.engine.answers = [FINAL + "Noon."]
    with server.http() as client:
        answer = client.post("/v1/messages", json=body).json()
    assert [block["text"] for block in answer["content"]] == ["Noon."]
    assert "<|channel|>analysis<|message|>Hm, 2 < 3.\n\nI look.<|end|>" in server.engine.texts[-1]
