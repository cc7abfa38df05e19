"""Tool calls through the real `openai` client, on an engine that answers with given texts."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import msgspec
import openai
import pytest
from msgspec import Raw
from pydantic import BaseModel
from support.parsed_answers import MISTRAL_TOKENS
from support.scripted_engine import (
    DEAF_TEMPLATE,
    PLAIN_TEMPLATE,
    ScriptedEngine,
    qwen,
)
from support.serving import Served, served
from support.tool_cases import (
    CLOCK,
    ODD_ARGUMENTS,
    QUESTION,
    WEATHER,
    Answer,
    hermes,
    streamed_answers,
    whole_answer,
)
from support.waiting import until

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.requests.chat_messages import NO_FACTS, CalledFunction, Fitting, ToolCall
from minisgl.text.parsing.formats import BY_NAME
from minisgl.text.tokenizer import Tokenizer

CALL = hermes("get_weather", {"city": "Köln", "days": 2})
CALLED = ("get_weather", '{"city": "Köln", "days": 2}')


BROKEN_ARGUMENTS = ('{"a": "x', '{"a": 1,', '{"a":', '{"a": tru}', "[1]", '"Köln"', "{'a': 1}")


class GetWeather(BaseModel):
    city: str
    unit: Literal["C", "F"]


@contextlib.contextmanager
def scripted(tokenizer: Tokenizer, **options: Any) -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(tokenizer)

    with served(start, **options) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    with scripted(qwen(PLAIN_TEMPLATE)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served[ScriptedEngine]) -> Iterator[openai.OpenAI]:
    with server.openai() as found:
        yield found


def ask(
    server: Served[ScriptedEngine], client: openai.OpenAI, answer: str, **fields: Any
) -> Answer:
    """The answer, whole and streamed in several runs of tokens, which must be the same."""
    server.engine.answers = [answer]
    request: dict[str, Any] = {"model": "fake", "messages": QUESTION, "tools": [WEATHER, CLOCK]}
    request |= fields
    server.engine.run = 1
    whole = whole_answer(client.chat.completions.create(**request).choices[0])
    for run in (1, 2, 3, 1000):
        server.engine.run = run
        with client.chat.completions.create(**request, stream=True) as chunks:
            [streamed] = streamed_answers(chunks)
        assert (streamed.content or "") == (whole.content or "")
        assert (streamed.reasoning, streamed.made) == (whole.reasoning, whole.made)
        assert streamed.finish_reason == whole.finish_reason
        assert streamed.logprobs == whole.logprobs
    return whole


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        (CALL, None, [CALLED]),
        ("Let me see.\n" + CALL, "Let me see.", [CALLED]),
        (f"{CALL}\n{hermes('clock', {})}\n{CALL}", None, [CALLED, ("clock", "{}"), CALLED]),
        # Braces, quotes and closing tags in strings come out letter for letter.
        (
            hermes("f", r'{"a":"mkdir {a,b \"\\ </b> \u00e9 é 👍🏽"}'),
            None,
            [("f", r'{"a":"mkdir {a,b \"\\ </b> \u00e9 é 👍🏽"}')],
        ),
        ("No tool fits.", "No tool fits.", []),
        ("", "", []),
    ],
)
def test_calls_come_out_the_same_whole_and_streamed(
    server: Served[ScriptedEngine],
    client: openai.OpenAI,
    answer: str,
    content: str | None,
    calls: list[tuple[str, str]],
) -> None:
    found = ask(server, client, answer)
    assert (found.content, found.made) == (content, calls)
    assert found.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call["id"] for call in found.calls}) == len(calls)
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", call["id"]) for call in found.calls)


@pytest.mark.parametrize(
    ("parser", "answer", "call"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            ("get_weather", {"city": "Köln", "days": 2}),
        ),
        ("qwen3_coder", "<function=clock>\n</function>", ("clock", {})),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Köln"}}', None),
        ("pythonic", "[get_weather(city='Köln')]", None),
        ("functionary_v3_1", '<function=get_weather>{"city": "Köln"}</function>', None),
        ("functionary_v3_2", 'get_weather\n{"city": "Köln"}', None),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Köln"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            None,
        ),
        ("xlam", '[{"name": "get_weather", "arguments": {"city": "Köln"}}]', None),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}}]', None),
    ],
)
def test_every_format_is_parsed_by_its_name(
    parser: str, answer: str, call: tuple[str, Any] | None
) -> None:
    name, arguments = call or ("get_weather", {"city": "Köln"})
    tokenizer = qwen(PLAIN_TEMPLATE, "[TOOL_CALLS]")
    with scripted(tokenizer, tool_parser=parser) as server, server.openai() as client:
        found = ask(server, client, answer)
    [made] = found.made
    assert (made[0], json.loads(made[1])) == (name, arguments)
    assert (found.content, found.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize(
    ("parser", "markers", "call"),
    [
        ("glm45", BY_NAME["glm45"].markers,
         "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (
            "gemma4",
            BY_NAME["gemma4"].markers,
            '<|tool_call>call:f{{code:<|"|>{}<|"|>}}<tool_call|>',
        ),
    ],
)  # fmt: skip
def test_a_tool_with_a_pattern_is_held_in_every_api(
    parser: str, markers: tuple[str, ...], call: str
) -> None:
    code = {"type": "string", "pattern": "^[A-Z]|x$", "maxLength": 4}
    schema = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    function = {"name": "f", "parameters": schema}
    message = {"model": "fake", "messages": QUESTION}
    requests: dict[str, dict[str, Any]] = {
        "chat/completions": message
        | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        "messages": message
        | {"max_tokens": 99, "tool_choice": {"type": "any"}}
        | {"tools": [{"name": "f", "input_schema": schema}]},
        "responses": {"model": "fake", "input": "Which?", "tool_choice": "required"}
        | {"tools": [{"type": "function", **function}]},
    }
    tokenizer = qwen(PLAIN_TEMPLATE, *markers)
    with scripted(tokenizer, tool_parser=parser) as server, server.openai() as client:
        for path, request in requests.items():
            server.engine.answers = [call.format("ABC")]
            answer = client.post(f"/{path}", body=request, cast_to=httpx.Response)
            assert "ABC" in answer.text
            server.engine.answers = [call.format("abc")]
            with pytest.raises(openai.APIStatusError):
                client.with_options(max_retries=0).post(
                    f"/{path}", body=request, cast_to=httpx.Response
                )


def test_the_markup_of_an_answer_without_tools_is_no_content() -> None:
    tokenizer = qwen(PLAIN_TEMPLATE)
    with scripted(tokenizer, tool_parser="functionary_v3_2") as server, server.openai() as client:
        for fields in ({"tools": None}, {"tool_choice": "none"}, {}):
            found = ask(server, client, "all\nHello!", **fields)
            assert (found.content, found.calls, found.finish_reason) == ("Hello!", [], "stop")


@pytest.mark.parametrize(
    ("fields", "answer", "reason"),
    [
        ({}, CALL, "tool_calls"),
        ({"max_tokens": 30}, CALL, "length"),  # inside of the arguments
        ({"stop": ["."]}, "I see. " + CALL, "stop"),
        ({"stop": ["city"]}, CALL, "tool_calls"),  # arguments are no content
        ({"tool_choice": "required"}, CALL, "tool_calls"),
        # What cannot be read is not for running.
        *(({}, hermes("clock", written), "length") for written in BROKEN_ARGUMENTS),
        ({}, hermes("clock", '{"a": ') + CALL, "length"),
    ],
)
def test_calls_end_an_answer_only_where_the_model_ends_it(
    server: Served[ScriptedEngine],
    client: openai.OpenAI,
    fields: dict[str, Any],
    answer: str,
    reason: str,
) -> None:
    assert ask(server, client, answer, **fields).finish_reason == reason


def test_a_cut_call_has_the_beginning_of_its_arguments(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    [(name, arguments)] = ask(server, client, CALL, max_tokens=30).made
    assert name == "get_weather"
    assert CALLED[1].startswith(arguments) and arguments != CALLED[1]


def test_without_tools_or_with_tool_choice_none_calls_are_text(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": None, "tool_choice": "auto"}):
        found = ask(server, client, CALL, **fields)
        assert (found.content, found.calls, found.finish_reason) == (CALL, [], "stop")
        assert "get_weather" not in server.engine.texts[-1]
        assert server.engine.streams[-1].parser is None


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
@pytest.mark.parametrize("max_tokens", [1, 3, 8])
def test_a_required_call_that_is_cut_in_its_name_leaves_no_markup(
    server: Served[ScriptedEngine], client: openai.OpenAI, choice: Any, max_tokens: int
) -> None:
    found = ask(server, client, CALL, tool_choice=choice, max_tokens=max_tokens)
    assert (found.content or "", found.calls, found.finish_reason) == ("", [], "length")


def test_results_of_tools_reach_the_template(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers = [f"{CALL}\n{hermes('clock', {})}", "It rains at noon."]
    server.engine.run = 1
    create = client.chat.completions.create
    first = create(model="fake", messages=QUESTION, tools=[WEATHER, CLOCK]).choices[0].message
    assert first.tool_calls is not None
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(first.tool_calls, ("rain", "noon"), strict=True)
    ]
    second = create(model="fake", messages=[*QUESTION, first, *results], tools=[WEATHER, CLOCK])
    assert second.choices[0].message.content == "It rains at noon."
    assert second.choices[0].finish_reason == "stop"
    text = server.engine.texts[-1]
    # As the model has written it, so that the prefix is found in the cache.
    assert f"assistant\n{CALL}\n{hermes('clock', {})}<|im_end|>" in text
    assert "<tool_response>rain</tool_response>" in text
    assert text.index("rain") < text.index("noon")


@pytest.mark.parametrize(
    ("choice", "answer", "obeyed"),
    [
        ("required", CALL, True),
        ("required", f"{CALL}\n{CALL}", True),
        ("required", "No.", False),
        ("required", "I see. " + CALL, False),
        ("required", hermes("unknown", {}), False),
        ("required", hermes("get_weather", {"city": 3}), False),
        ({"type": "function", "function": {"name": "clock"}}, hermes("clock", {}), True),
        ({"type": "function", "function": {"name": "clock"}}, CALL, False),
        (
            {"type": "function", "function": {"name": "clock"}},
            hermes("clock", {}) + "\n" + hermes("clock", {}),
            False,
        ),
        ("auto", "No.", True),
        ("auto", hermes("get_weather", {"city": 3}), True),
    ],
)
def test_the_answer_is_held_to_the_tool_choice(
    server: Served[ScriptedEngine],
    client: openai.OpenAI,
    choice: Any,
    answer: str,
    obeyed: bool,
) -> None:
    if obeyed:
        assert bool(ask(server, client, answer, tool_choice=choice).calls) == (answer != "No.")
    else:
        with pytest.raises(openai.BadRequestError):
            ask(server, client, answer, tool_choice=choice)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_can_be_called_though_the_model_sees_all(
    server: Served[ScriptedEngine], client: openai.OpenAI, mode: str
) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert ask(server, client, hermes("clock", {}), tool_choice=choice).made == [("clock", "{}")]
    assert "get_weather" in server.engine.texts[-1]
    with pytest.raises(openai.BadRequestError):
        ask(server, client, CALL, tool_choice=choice)


def test_one_call_is_made_without_parallel_tool_calls(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    fields: Any = {"parallel_tool_calls": False}
    assert ask(server, client, "Yes.\n" + CALL, **fields).made == [CALLED]
    assert ask(server, client, "No.", **fields).content == "No."
    # Arguments are free where the tool is not strict.
    assert ask(server, client, hermes("get_weather", {"town": 1}), **fields).calls
    with pytest.raises(openai.BadRequestError):
        ask(server, client, f"{CALL}\n{CALL}", **fields)


def test_strict_tools_hold_the_arguments_and_not_the_choice(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    tools = [openai.pydantic_function_tool(GetWeather), CLOCK]
    assert ask(server, client, "No.", tools=tools).content == "No."
    good = hermes("GetWeather", {"city": "Köln", "unit": "C"})
    assert ask(server, client, good, tools=tools).calls
    with pytest.raises(openai.BadRequestError):
        ask(server, client, hermes("GetWeather", {"city": "Köln", "unit": "K"}), tools=tools)


def test_parsed_arguments_of_pydantic_tools(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers = [hermes("GetWeather", {"city": "Köln", "unit": "C"})]
    tools = [openai.pydantic_function_tool(GetWeather)]
    found = client.chat.completions.parse(model="fake", messages=QUESTION, tools=tools)
    [call] = found.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Köln", unit="C")
    names = []
    with client.chat.completions.stream(model="fake", messages=QUESTION, tools=tools) as stream:
        for event in stream:
            names.append(event.type)
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Köln", unit="C")
    assert names[-1] == "tool_calls.function.arguments.done"
    assert "tool_calls.function.arguments.delta" in names


async def test_calls_of_several_choices_through_the_async_client(
    server: Served[ScriptedEngine],
) -> None:
    server.engine.answers = [CALL, "No.", f"{CALL}\n{hermes('clock', {})}"]
    server.engine.run = 1
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=QUESTION,
            tools=[WEATHER, CLOCK],
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    answers = streamed_answers(chunks)
    assert [len(answer.calls) for answer in answers] == [1, 0, 2]
    assert [answer.finish_reason for answer in answers] == ["tool_calls", "stop", "tool_calls"]
    sizes = [len(server.engine.tokenizer.encode(text)) for text in (CALL, "No.")]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > sum(sizes)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 0


def test_custom_tools_take_a_text(server: Served[ScriptedEngine], client: openai.OpenAI) -> None:
    digits = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    tool: Any = {"type": "custom", "custom": {"name": "dial", "format": digits}}
    server.engine.run = 1
    server.engine.answers = [hermes("dial", {"input": "0221"})]
    create = client.chat.completions.create
    for choice in ("auto", "required", {"type": "custom", "custom": {"name": "dial"}}):
        request: Any = {"model": "fake", "messages": QUESTION, "tools": [tool]}
        found = create(**request, tool_choice=choice).choices[0]
        [call] = found.message.tool_calls or []
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("dial", "0221")
        assert found.finish_reason == "tool_calls"
        chunks = [*create(**request, tool_choice=choice, stream=True)]
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert [(part.id is None, part.type) for part in parts] == [(False, "custom"), (True, None)]
        assert parts[1].model_extra == {"custom": {"input": "0221"}}
        # Its call in the history is a call with one argument.
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "tuut"}
        create(**{**request, "messages": [*QUESTION, found.message, result]})
        assert hermes("dial", {"input": "0221"}) in server.engine.texts[-1]
    server.engine.answers = [hermes("dial", {"input": "Köln"})]
    with pytest.raises(openai.BadRequestError):
        create(**request)


def call_in_history(**fields: Any) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call | fields]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
        ),
        (
            {
                "tools": [
                    CLOCK,
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"type": "object", "not": {"required": ["a"]}},
                        },
                    },
                ]
            },
            "tools.1.function.parameters",
        ),
        (
            {
                "tool_choice": "required",
                "response_format": {"type": "json_object", "schema": {"type": "x"}},
            },
            "response_format.schema",
        ),
        ({"functions": [{"name": "f"}], "tools": None}, "functions"),
        ({"function_call": "auto", "tools": None}, "function_call"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, None),
        (
            {"messages": call_in_history(function={"name": "f", "arguments": []})},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"messages": call_in_history(function=None)}, "messages.1.tool_calls.0.function"),
    ],
)
def test_what_is_wrong_with_tools_is_named(
    server: Served[ScriptedEngine],
    client: openai.OpenAI,
    fields: dict[str, Any],
    param: str | None,
) -> None:
    request: Any = {"model": "fake", "messages": QUESTION, "tools": [WEATHER], **fields}
    if fields.get("messages", [{}])[0].get("tool_calls") == []:  # of no effect
        client.chat.completions.create(**request)
        return
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert caught.value.param == (param or "response_format")


@pytest.mark.parametrize("limit", [None, 30, 36])
@pytest.mark.parametrize("written", [*ODD_ARGUMENTS, CALLED[1]])
def test_every_call_is_taken_back_as_history(
    server: Served[ScriptedEngine], client: openai.OpenAI, written: str, limit: int | None
) -> None:
    found = ask(server, client, hermes("get_weather", written), max_tokens=limit)
    [(name, made)] = found.made
    assert name == "get_weather" and written.startswith(made) and (limit or made == written)
    call = {"id": found.calls[0]["id"], "type": "function", "function": {"name": name}}
    call["function"]["arguments"] = made
    said: Any = {"role": "assistant", "content": found.content, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "invalid"}
    messages = [*QUESTION, said, result]
    client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    shown: Any = {"": {}, CALLED[1]: {"city": "Köln", "days": 2}}
    assert hermes(name, shown.get(made, {"input": made})) in server.engine.texts[-1]


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_a_call_in_the_history_may_have_no_arguments(
    server: Served[ScriptedEngine], client: openai.OpenAI, arguments: Any
) -> None:
    messages = call_in_history(function={"name": "clock", "arguments": arguments})
    client.chat.completions.create(model="fake", messages=messages, tools=[CLOCK])
    assert hermes("clock", {}) in server.engine.texts[-1]


@pytest.mark.parametrize("depth", [199, 200, 500, 985, 100_000])
def test_deep_arguments_are_taken_back(
    server: Served[ScriptedEngine], client: openai.OpenAI, depth: int
) -> None:
    """As a text, where they are deeper than templates can write."""
    deep = '{"a": ' + "[" * depth + "]" * depth + ', "b": "[[["}'
    messages = call_in_history(function={"name": "clock", "arguments": deep})
    client.chat.completions.create(model="fake", messages=messages, tools=[CLOCK])
    shown = json.loads(deep) if depth < 200 else {"input": deep}
    assert hermes("clock", shown) in server.engine.texts[-1]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a":1.50, "b": "1e999"}', {"a": 1.5, "b": "1e999"}),
        ('{"a":-1e999}', {"input": '{"a":-1e999}'}),
        ('{"a": [' + "9" * 5000 + "]}", {"input": '{"a": [' + "9" * 5000 + "]}"}),
        ({"a": Raw(b"1E+400")}, {"input": '{"a":1E+400}'}),
    ],
)
def test_arguments_with_a_number_beyond_those_of_python_are_a_text(
    written: Any, shown: dict[str, Any]
) -> None:
    call = ToolCall("a", function=CalledFunction("f", written))
    made = call.for_template("messages.0.tool_calls.0", Fitting(NO_FACTS))
    assert json.loads(msgspec.json.encode(made["function"]["arguments"])) == shown


def test_a_template_without_tools_refuses_them() -> None:
    tokenizer = qwen(DEAF_TEMPLATE)
    with scripted(tokenizer, tool_parser="hermes") as server, server.openai() as client:
        server.engine.answers = ["Yes."]
        create: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="chat template") as caught:
            create(model="fake", messages=QUESTION, tools=[CLOCK])
        assert caught.value.param == "tools"
        create(model="fake", messages=QUESTION, tools=[CLOCK], tool_choice="none")
        create(model="fake", messages=QUESTION, tools=[])
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="fake", messages=call_in_history())
        assert caught.value.param == "messages.1.tool_calls"
        result = {"role": "tool", "tool_call_id": "a", "content": "x"}
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="fake", messages=[*QUESTION, result])
        assert caught.value.param == "messages.1.role"


def test_a_template_of_unknown_format_asks_for_the_option() -> None:
    template = PLAIN_TEMPLATE.replace("tool_call>", "call>")
    with scripted(qwen(template)) as server, server.openai() as client:
        with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
            client.chat.completions.create(model="fake", messages=QUESTION, tools=[CLOCK])
        assert caught.value.param == "tools"
    with scripted(qwen(template), tool_parser="none") as server, server.openai() as client:
        found = ask(server, client, CALL)
        assert (found.content, found.calls) == (CALL, [])


MISTRAL_TEMPLATE = """\
{% for message in messages %}
{%- if message.role == "tool" %}{% if message.tool_call_id | length != 9 %}
{{- raise_exception("ids have 9 letters") }}{% endif %}
{{- message.name }}={{ message.content }}@{{ message.tool_call_id }}
{%- else %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if call.id | length != 9 %}
{{- raise_exception("ids have 9 letters") }}{% endif %}
{{- "[TOOL_CALLS]" }}[{"name": "{{ call.function.name }}", "arguments":
{{- call.function.arguments | tojson }}, "id": "{{ call.id }}"}]{% endfor %}{% endif %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""


def test_ids_have_nine_letters_where_the_template_asks_for_it() -> None:
    tokenizer = qwen(MISTRAL_TEMPLATE, *MISTRAL_TOKENS[:1])
    with scripted(tokenizer) as server, server.openai() as client:
        answer = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}}]'
        found = ask(server, client, answer)
        assert re.fullmatch("[a-zA-Z0-9]{9}", found.calls[0]["id"])
        messages = call_in_history(id="call_of_another_server")
        result = {"role": "tool", "tool_call_id": "call_of_another_server", "content": "x"}
        for _ in range(2):
            client.chat.completions.create(model="fake", messages=[*messages, result])
        first, again = server.engine.texts[-2:]
        assert first == again
        found_ids = re.findall(r'"id": "(\w{9})"|@(\w{9})', first)
        assert found_ids[0][0] == found_ids[1][1]
        assert "f=x@" in first  # the name of the tool


def test_logprobs_are_those_of_the_content(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    found = ask(server, client, "Let me see.\n" + CALL, logprobs=True)
    assert "".join(found.logprobs) == "Let me see." == found.content
    found = ask(server, client, f"Let me see.\n{CALL}\nDone.", logprobs=True)
    assert found.content == "Let me see.\n\nDone."
    assert "".join(found.logprobs) == "Let me see.Done."
    assert ask(server, client, CALL, logprobs=True).logprobs == []
    # Also of an answer that ends inside of a character.
    for limit in range(1, 6):
        found = ask(server, client, "a日本", logprobs=True, max_tokens=limit)
        assert "".join(found.logprobs) == found.content


def test_calls_are_counted_and_never_logged(
    server: Served[ScriptedEngine], client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with server.http() as http:
        before = number_of_calls(http.get("/metrics").text)
        ask(server, client, CALL)
        assert number_of_calls(http.get("/metrics").text) == before + 5
    with pytest.raises(openai.BadRequestError):
        ask(server, client, CALL, tools=[{"type": "function", "function": {"name": "se cret"}}])
    assert "Köln" not in caplog.text and "cret" not in caplog.text


def number_of_calls(metrics: str) -> int:
    found = re.search(r"^minisgl_tool_calls_total ([\d.]+)$", metrics, re.M)
    assert found is not None
    return int(float(found[1]))


def test_tools_count_in_tokenize(server: Served[ScriptedEngine]) -> None:
    with server.http() as http:
        body: Any = {"messages": QUESTION}
        plain = http.post("/tokenize", json=body).json()["count"]
        offered = http.post("/tokenize", json=body | {"tools": [WEATHER]}).json()["count"]
    assert offered > plain


async def test_a_client_that_leaves_ends_its_answer(server: Served[ScriptedEngine]) -> None:
    server.engine.answers = [CALL * 2000]
    server.engine.run = 1
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        stream = await client.chat.completions.create(
            model="fake", messages=QUESTION, tools=[WEATHER], stream=True
        )
        async for _ in stream:
            break
        await stream.close()
    await until(lambda: server.engine.streams[-1].aborted)


def test_a_plain_chat_has_no_parser(server: Served[ScriptedEngine], client: openai.OpenAI) -> None:
    server.engine.answers = ["Yes."]
    client.chat.completions.create(model="fake", messages=QUESTION)
    stream = server.engine.streams[-1]
    assert stream.parser is None and stream.matcher is None


def test_null_stands_for_a_field_that_is_not_given(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    spec = {"name": "clock", "description": None, "parameters": None, "strict": None}
    tools = [{"type": "function", "function": spec}]
    answer = hermes("clock", {})
    found = ask(server, client, answer, tools=tools, tool_choice=None, parallel_tool_calls=None)
    assert found.made == [("clock", "{}")]
    assert ask(server, client, answer, tools=tools, tool_choice="required").calls
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]}
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    ask(server, client, "Yes.", messages=[*QUESTION, said, result, *QUESTION])
    assert "<tool_response>noon</tool_response>" in server.engine.texts[-1]


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser", "reasoning_field"])
def test_an_unknown_parser_is_refused_with_the_names_of_all(option: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: .* or (none|both)") as caught:
        ServerConfig(**{option: "qwen"})
    assert caught.value.param == "--" + option.replace("_", "-")


def test_the_log_names_the_parsers_that_the_template_asks_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with scripted(qwen()) as server:
        state = EngineState(ServerConfig())
        server.on_loop(lambda: state.start(server.engine))
    assert "tool calls hermes, reasoning think" in caplog.text
