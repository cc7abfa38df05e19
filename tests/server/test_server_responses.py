"""/v1/responses through the real `openai` client, on an engine that answers with given texts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import re
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseInputItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support.response_events import events_of, streamed_response
from support.scripted_engine import QWEN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, served
from support.tool_cases import ODD_ARGUMENTS, hermes
from support.waiting import until

from minisgl.server.http.bodies import MAX_BODY_BYTES

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CLOCK: Any = {"type": "function", "name": "clock", "parameters": None, "strict": None}
NOTE: Any = {"type": "custom", "name": "note", "description": "Takes a note."}
TOOLS = [WEATHER, CLOCK, NOTE]
SEARCH: Any = {"type": "web_search", "filters": {"allowed_domains": ["example.com"]}}
CALL = hermes("get_weather", {"city": "Köln", "days": 2})
ARGUMENTS = '{"city": "Köln", "days": 2}'
THOUGHT = "<think>\nHm, Köln.\n</think>\n\n"


@contextlib.contextmanager
def scripted(
    template: str = QWEN_TEMPLATE, *special: str, **options: Any
) -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(qwen(template, *special))

    with served(start, **options) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    with scripted() as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served[ScriptedEngine]) -> Iterator[openai.OpenAI]:
    with server.openai() as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Served[ScriptedEngine]) -> Iterator[httpx.Client]:
    with server.http() as found:
        yield found


@pytest.fixture(scope="module")
def described(http: httpx.Client) -> Any:
    """The description of the server, of which a validator takes any part."""
    return http.get("/openapi.json").json()


def check_described(described: Any, schema: Any, value: Any) -> None:
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    validator.validate(value)


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    response = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert response.status_code == 200, response.text
    return response


@pytest.fixture
def ask(server: Served[ScriptedEngine], http: httpx.Client, described: Any) -> Any:
    """The answer to a request, whole and streamed in several runs of tokens, which must be equal,
    valid for the client's own types, and as /openapi.json says."""

    def asked(answer: str, **fields: Any) -> Response:
        engine = server.engine
        engine.answers, engine.run, engine.chance = [answer], 1, None
        body = post(http, **fields).json()
        check_described(described, {"$ref": "#/components/schemas/Response"}, body)
        whole = Response.model_validate(body)
        content = described["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
        data = content["text/event-stream"]["schema"]["properties"]["data"]
        splits = [(run, None) for run in (1, 2, 3, 1000)]
        for run, chance in [*splits, *((9, random.Random(seed)) for seed in range(5))]:
            engine.run, engine.chance = run, chance
            events = events_of(post(http, **fields, stream=True))
            for event in events if run == 3 else ():
                EVENT.validate_python(event)
                check_described(described, data["contentSchema"], event)
            streamed = Response.model_validate(streamed_response(events))
            assert contents(streamed) == contents(whole)
            assert (streamed.status, streamed.usage) == (whole.status, whole.usage)
            assert streamed.incomplete_details == whole.incomplete_details
        ids = [item.id for item in whole.output]
        assert len(set(ids)) == len(ids) and whole.id.startswith("resp_")
        return whole

    return asked


def contents(response: Response) -> list[tuple[str, ...]]:
    """The items without their ids."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        match item.type:
            case "message":
                [part] = item.content
                assert part.type == "output_text"
                found.append(("message", part.text, item.status))
            case "reasoning":
                assert item.content is not None and item.status is not None
                found.append(("reasoning", item.content[0].text, item.status))
            case "function_call":
                assert item.status is not None
                found.append((item.name, item.arguments, item.status))
            case "custom_tool_call":
                found.append((item.name, item.input, item.status))  # type: ignore[attr-defined]
    return found


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ("Hello 👍🏽.", [("message", "Hello 👍🏽.")]),
        ("", [("message", "")]),
        (THOUGHT + "It rains.", [("reasoning", "Hm, Köln."), ("message", "It rains.")]),
        (THOUGHT, [("reasoning", "Hm, Köln."), ("message", "")]),
        (CALL, [("get_weather", ARGUMENTS)]),
        (
            f"{THOUGHT}Let me see.\n{CALL}\n{hermes('clock', {})}\n{CALL}",
            [
                ("reasoning", "Hm, Köln."),
                ("message", "Let me see."),
                ("get_weather", ARGUMENTS),
                ("clock", "{}"),
                ("get_weather", ARGUMENTS),
            ],
        ),
        (
            f"One.\n{CALL}\nTwo.",
            [("message", "One."), ("get_weather", ARGUMENTS), ("message", "Two.")],
        ),
        (hermes("note", {"input": 'a\n"b" \\ é'}), [("note", 'a\n"b" \\ é')]),
        # What the model wrote comes out letter for letter, and so do tools that do not exist.
        (hermes("f", r'{"a":"{ \"\\ </b> é 👍🏽"}'), [("f", r'{"a":"{ \"\\ </b> é 👍🏽"}')]),
    ],
)
def test_an_answer_has_the_same_items_whole_and_streamed(
    ask: Any, answer: str, items: list[tuple[str, str]]
) -> None:
    response = ask(answer, tools=TOOLS)
    assert contents(response) == [(*item, "completed") for item in items]
    assert response.status == "completed" and response.incomplete_details is None
    calls = [item.call_id for item in response.output if "call" in item.type]
    assert len(set(calls)) == len(calls)
    assert response.output_text == "".join(text for kind, text in items if kind == "message")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens_details.reasoning_tokens > 0) == answer.startswith(THOUGHT)


def test_an_answer_that_is_cut_is_incomplete(ask: Any) -> None:
    text = ask("It rains in the morning.", max_output_tokens=3)
    assert text.status == "incomplete" and text.incomplete_details.reason == "max_output_tokens"
    assert text.usage.output_tokens == 3
    assert [item.status for item in text.output] == ["incomplete"]
    thinking = ask("<think>\nHm, hm, hm, hm.\n</think>\n\nYes.", max_output_tokens=4)
    assert [item.type for item in thinking.output] == ["reasoning"]
    assert thinking.output[0].status == "incomplete"


def test_a_call_that_is_cut_is_incomplete_and_those_before_it_are_not(ask: Any) -> None:
    tokens = len(qwen().encode(f"{CALL}\n{CALL}", add_special_tokens=False))
    cut = ask(f"{CALL}\n{CALL}", tools=TOOLS, max_output_tokens=tokens - 8)
    assert [item.status for item in cut.output] == ["completed", "incomplete"]
    [_, last] = cut.output
    assert ARGUMENTS.startswith(last.arguments) and last.arguments != ARGUMENTS
    # Cut behind its arguments, it can be run.
    whole = ask(f"{CALL}\n{CALL}", tools=TOOLS, max_output_tokens=tokens - 1)
    assert whole.status == "incomplete"
    assert [item.status for item in whole.output] == ["completed", "completed"]


@pytest.mark.parametrize("written", ['{"city": "Köln', '{"city": "Köln",', "Köln", "[1]"])
def test_a_call_whose_arguments_are_no_object_is_incomplete(ask: Any, written: str) -> None:
    found = ask(hermes("get_weather", written), tools=TOOLS)
    assert (found.status, [item.status for item in found.output]) == ("incomplete", ["incomplete"])


def test_the_response_repeats_its_settings(ask: Any) -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "temperature": 0.25,
        "top_p": 0.75,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "web_search"}, {"type": "function", "name": "clock"}],
        },
        "tools": [SEARCH, *TOOLS],
        "truncation": "auto",
        "store": False,
    }
    response = ask("Yes.", **fields).model_dump(mode="json")
    assert response["reasoning"]["effort"] == "low"
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "clock", "note"]
    assert response["tools"][0]["parameters"] == WEATHER["parameters"]
    assert response["tool_choice"]["tools"][1]["name"] == "clock"
    for name in (
        "instructions",
        "max_output_tokens",
        "metadata",
        "parallel_tool_calls",
        "temperature",
        "top_p",
        "truncation",
        "store",
    ):
        assert response[name] == fields[name]


def test_logprobs_spell_the_text(ask: Any) -> None:
    answer = f"{THOUGHT}It rains in Köln.\n{CALL}"
    for fields in (
        {"include": ["message.output_text.logprobs"]},
        {"top_logprobs": 0, "include": ["message.output_text.logprobs"]},
    ):
        _, message, _ = ask(answer, tools=TOOLS, **fields).output
        tokens = message.content[0].logprobs
        assert "".join(token.token for token in tokens) == message.content[0].text.strip()
    [plain] = ask("It rains.").output
    assert plain.content[0].logprobs == []


def test_a_token_of_the_text_that_goes_on_behind_it_has_its_logprob() -> None:
    # As ".\n" before a call, of which the line break is markup.
    with scripted(QWEN_TEMPLATE, "see.\n") as server, server.openai() as client:
        server.engine.answers = [f"Let me see.\n{CALL}\nDone."]
        for server.engine.run in (1, 3, 1000):
            found = client.responses.create(
                model="fake",
                input="Hi",
                tools=TOOLS,
                include=["message.output_text.logprobs"],
                extra_body={"skip_special_tokens": False},
            )
            texts = [item.content[0] for item in found.output if item.type == "message"]
            spelled = ["".join(token.token for token in text.logprobs) for text in texts]
            assert spelled == [text.text for text in texts] == ["Let me see.", "Done."]


def test_a_failure_in_a_stream_ends_it_with_response_failed(
    server: Served[ScriptedEngine], http: httpx.Client, described: Any
) -> None:
    server.engine.answers, server.engine.run = ["{no JSON"], 1
    format = {"type": "json_object"}
    events = events_of(post(http, text={"format": format}, stream=True))
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
    assert (
        response["error"]["code"] == "server_error"
        and "mask forbids" in response["error"]["message"]
    )
    assert contents(Response.model_validate(response)) == [("message", "{", "in_progress")]
    EVENT.validate_python(events[-1])
    whole = http.post("/v1/responses", json={"input": "Hi", "text": {"format": format}})
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "grammar_failed")


def test_a_client_that_leaves_ends_its_request(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers, server.engine.run = ["on and on " * 20_000], 1
    with client.responses.create(model="fake", input="Hi", stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    asyncio.run(until(lambda: server.engine.streams[-1].aborted))


# -- input -----------------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "content": content, **fields}


def called(id: str, name: str = "get_weather", arguments: str = '{"city": "Köln"}') -> Any:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def returned(id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


THOUGHTS = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
    "encrypted_content": None,
}
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"input": "Hi"}, turn("user", "Hi")),
        ({"input": [{"role": "user", "content": "Hi", "type": None}]}, turn("user", "Hi")),
        (
            {"input": "Hi", "instructions": "Be brief."},
            turn("system", "Be brief.") + turn("user", "Hi"),
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": "A"},
                    {"role": "system", "content": [{"type": "input_text", "text": "B"}]},
                    user("Where?"),
                    user("Now?"),
                ],
                "instructions": "I",
            },
            turn("system", "I\n\nA\n\nB") + turn("user", "Where?\n\nNow?"),
        ),
        # All that the model said between two turns of others is one message.
        (
            {
                "input": [
                    user("Hi"),
                    THOUGHTS,
                    said("Let me see.", id="msg_1", status="completed", phase="commentary"),
                    called("c1"),
                    called("c2"),
                    returned("c1", "rain"),
                    returned(
                        "c2",
                        [{"type": "input_text", "text": "s"}, {"type": "input_text", "text": "un"}],
                    ),
                    {
                        **THOUGHTS,
                        "content": None,
                        "summary": [{"type": "summary_text", "text": "So."}],
                    },
                    said("Rain."),
                    user("Thanks"),
                ]
            },
            turn("user", "Hi")
            + turn("assistant", f"<think>\nHm.\n</think>\n\nLet me see.{WRITTEN}\n{WRITTEN}")
            + turn("tool", "<tool_response>rain</tool_response>")
            + turn("tool", "<tool_response>sun</tool_response>")
            + turn("assistant", "<think>\nSo.\n</think>\n\nRain.")
            + turn("user", "Thanks"),
        ),
        (
            {
                "input": [
                    {"type": "custom_tool_call", "call_id": "c", "name": "note", "input": "a\nb"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
                ]
            },
            turn(
                "assistant",
                '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>',
            )
            + turn("tool", "<tool_response>ok</tool_response>"),
        ),
        # A model may have written something else than an object; the agent that ran it says so.
        (
            {"input": [called("c", arguments='{"city": "K'), returned("c", "invalid")]},
            turn(
                "assistant",
                '<tool_call>\n{"name": "get_weather", "arguments": '
                '{"input": "{\\"city\\": \\"K"}}\n</tool_call>',
            )
            + turn("tool", "<tool_response>invalid</tool_response>"),
        ),
        (
            {
                "input": [
                    said(""),
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                ]
            },
            turn("assistant", "No."),
        ),
        # Some clients ask for one token of an answer to nothing, to see whether a server is there.
        ({"input": [], "max_output_tokens": 1}, turn("user", "")),
        ({"input": "", "max_output_tokens": 1}, turn("user", "")),
        ({"input": [], "instructions": "I"}, turn("system", "I") + turn("user", "")),
    ],
)
def test_input_becomes_the_messages_of_a_chat(
    server: Served[ScriptedEngine], http: httpx.Client, fields: dict[str, Any], prompt: str
) -> None:
    server.engine.answers = ["Yes."]
    post(http, **fields)
    assert server.engine.texts[-1] == prompt + "<|im_start|>assistant\n"


def test_a_late_system_message_stays_where_the_template_takes_it_and_joins_the_first_otherwise(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    fields = {
        "input": [
            user("Hi"),
            said("Hello."),
            {"role": "developer", "content": "Now French."},
            user("Bye"),
        ],
        "instructions": "I",
    }
    server.engine.answers = ["Yes."]
    post(http, **fields)
    between = turn("user", "Hi") + turn("assistant", "Hello.")
    start, end = "", turn("user", "Bye") + "<|im_start|>assistant\n"
    expected = turn("system", "I") + between + turn("system", "Now French.") + end
    assert server.engine.texts[-1] == start + expected
    strict = """{%- for m in messages %}{% if m.role == "system" and not loop.first %}
{{- raise_exception("system comes first") }}{% endif %}{% endfor %}"""
    with scripted(strict + QWEN_TEMPLATE) as other, other.http() as caller:
        post(caller, **fields)
        assert other.engine.texts[-1] == turn("system", "I\n\nNow French.") + between + end


def test_an_answer_sent_back_with_the_result_of_its_call_makes_the_next_turn(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers, server.engine.run = [f"{THOUGHT}Let me see.\n{CALL}", "It rains."], 1
    asked: Any = [{"role": "user", "content": "How is Köln?"}]
    first = client.responses.create(model="fake", input=asked, tools=TOOLS)
    asked += [item.model_dump() for item in first.output]
    asked.append(returned(first.output[-1].call_id, "rain"))
    second = client.responses.create(model="fake", input=asked, tools=TOOLS)
    assert second.output_text == "It rains."
    text = server.engine.texts[-1]
    assert f"{THOUGHT}Let me see.{CALL}<|im_end|>" in text and ">rain</tool_response>" in text


# -- stored answers --------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_the_id_of_an_answer(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers = [f"{THOUGHT}Let me see.\n{CALL}", "It rains.", "Sun."]
    first = client.responses.create(model="fake", input="How is Köln?", tools=TOOLS)
    result: Any = [returned(first.output[-1].call_id, "rain")]  # type: ignore[union-attr]
    goes_on: Any = {"model": "fake", "tools": TOOLS}
    second = client.responses.create(**goes_on, input=result, previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.store is True
    asked = turn("user", "How is Köln?")
    called_tool = turn("assistant", f"{THOUGHT}Let me see.{CALL}")
    text = server.engine.texts[-1]
    assert text.endswith(
        asked
        + called_tool
        + turn("tool", "<tool_response>rain</tool_response>")
        + "<|im_start|>assistant\n"
    )
    with client.responses.create(
        **goes_on, input="Tomorrow?", previous_response_id=second.id, stream=True
    ) as stream:
        [*_, last] = stream
    assert last.type == "response.completed"
    third = client.responses.create(
        **goes_on, input="Why?", previous_response_id=last.response.id, instructions="Be brief."
    )
    text = server.engine.texts[-1]
    said_so_far = turn("assistant", "It rains.") + turn("user", "Tomorrow?")
    assert said_so_far + turn("assistant", "Sun.") + turn("user", "Why?") in text
    assert turn("system", "Be brief.") in text
    # The same answer may be gone on from twice, and instructions are not taken over.
    client.responses.create(**goes_on, input="Where?", previous_response_id=third.id)
    client.responses.create(**goes_on, input="Who?", previous_response_id=first.id)
    text = server.engine.texts[-1]
    assert asked + called_tool + turn("user", "Who?") in text and "brief" not in text


def test_a_stored_answer_is_shown_until_it_is_deleted(
    server: Served[ScriptedEngine], http: httpx.Client, described: Any
) -> None:
    server.engine.answers = [f"{THOUGHT}Yes."]
    for fields in ({}, {"stream": True}, {"store": True}, {"store": None}):
        answer = post(http, **fields)
        response = streamed_response(events_of(answer)) if fields.get("stream") else answer.json()
        path = f"/v1/responses/{response['id']}"
        shown = http.get(path).json()
        assert shown == response and shown["store"] is True
        check_described(described, {"$ref": "#/components/schemas/Response"}, shown)
        assert http.get(path, params={"stream": "true"}).json()["error"]["param"] == "stream"
        deleted = http.delete(path).json()
        assert deleted == {"id": response["id"], "object": "response", "deleted": True}
        for missing in (http.get(path), http.delete(path)):
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                404,
                "response_not_found",
            )
        goes_on = {"input": "Hi", "previous_response_id": response["id"]}
        missing = http.post("/v1/responses", json=goes_on)
        error = missing.json()["error"]
        assert (missing.status_code, error["param"]) == (400, "previous_response_id")
        assert error["code"] == "previous_response_not_found"
        assert f"previous response with id '{response['id']}' not found" in error["message"]


def test_an_answer_that_shall_not_be_stored_or_has_not_ended_is_not(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    response = post(http, store=False).json()
    assert response["store"] is False
    assert http.get(f"/v1/responses/{response['id']}").status_code == 404
    server.engine.answers, server.engine.run = ["{no JSON"], 1
    events = events_of(post(http, text={"format": {"type": "json_object"}}, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert http.get(f"/v1/responses/{events[0]['response']['id']}").status_code == 404


def test_ids_are_random_whatever_the_client_calls_its_request(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    ids = set()
    for _ in range(2):
        answer = http.post("/v1/responses", json={"input": "x"}, headers={"x-request-id": "mine"})
        found = re.fullmatch(r"resp_([0-9a-f]{32})", answer.json()["id"])
        assert found is not None
        ids.add(found[1])
        assert answer.json()["output"][0]["id"] == f"msg_{found[1]}00"
    assert len(ids) == 2


def test_references_stand_for_items_of_earlier_answers(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = [f"{THOUGHT}Let me see.\n{CALL}", "Yes."]
    first = post(http, tools=TOOLS).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del references[1]["type"]
    history = [user("Hi"), *references, returned(first["output"][-1]["call_id"], "rain")]
    second = post(http, tools=TOOLS, input=history).json()
    text = server.engine.texts[-1]
    expected = turn("user", "Hi") + turn("assistant", f"{THOUGHT}Let me see.{CALL}")
    assert expected + turn("tool", "<tool_response>rain</tool_response>") in text
    # They are kept as references, and still stand for the items.
    post(http, previous_response_id=second["id"], input="Why?")
    assert expected in server.engine.texts[-1]
    id = first["output"][0]["id"]
    for missing in ("msg_1", id[:-2] + "07", id.replace("rs_", "msg_")):
        body = {"input": [user("x"), {"type": "item_reference", "id": missing}]}
        response = http.post("/v1/responses", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (404, "input[1].id")
        assert error["code"] == "item_not_found"


def test_a_small_request_does_not_become_a_conversation_of_any_size(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["x" * 10_000]
    [item] = post(http).json()["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    response = http.post("/v1/responses", json={"input": [reference] * 2000})
    found = re.fullmatch(r"input\[(\d+)\]\.id", response.json()["error"]["param"])
    assert response.status_code == 400 and found is not None
    assert 10_000 * int(found[1]) < MAX_BODY_BYTES < 10_200 * (int(found[1]) + 1)
    server.engine.answers = ["Yes."]
    first = post(http, input=[said("x")] * 8000).json()
    goes_on = {"previous_response_id": first["id"], "input": [said("x")] * 200}
    response = http.post("/v1/responses", json=goes_on)
    assert response.json()["error"]["param"] == "previous_response_id"


def test_clients_with_keys_of_their_own_do_not_see_each_others_answers() -> None:
    with scripted(api_key=("a", "b")) as server, server.http() as http:
        server.engine.answers = ["Yes."]
        a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
        id = http.post("/v1/responses", json={"input": "Hi"}, headers=a).json()["id"]
        goes_on = {"input": "Hi", "previous_response_id": id}
        for headers, shown, answered in ((b, 404, 400), ({}, 401, 401), (a, 200, 200)):
            assert http.get(f"/v1/responses/{id}", headers=headers).status_code == shown
            response = http.post("/v1/responses", json=goes_on, headers=headers)
            assert response.status_code == answered
        assert http.delete(f"/v1/responses/{id}", headers=b).status_code == 404
        assert http.delete(f"/v1/responses/{id}", headers=a).status_code == 200


def test_without_a_store_nothing_is_kept_and_errors_say_what_to_send_instead() -> None:
    with scripted(response_store=0) as server, server.http() as http:
        server.engine.answers = ["Yes."]
        response = post(http, store=True).json()
        assert response["store"] is False
        assert http.get(f"/v1/responses/{response['id']}").status_code == 404
        for fields, param in (
            ({"previous_response_id": response["id"]}, "previous_response_id"),
            (
                {"input": [{"type": "item_reference", "id": response["output"][0]["id"]}]},
                "input[0].type",
            ),
        ):
            refused = http.post("/v1/responses", json={"input": "Hi", **fields})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param)
            assert "not stored" in error["message"]


def test_truncation_leaves_out_the_oldest_turns_that_do_not_fit(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    history: list[Any] = []
    for name in "abcd":
        history += [user(f"Question {name}"), called(name), returned(name, "x" * 200)]
    full = server.engine.capacity
    fields = {"input": history, "instructions": "Be brief.", "max_output_tokens": 8}
    num_tokens = post(http, **fields).json()["usage"]["input_tokens"]
    try:
        for room, left in ((num_tokens + 8, "abcd"), (num_tokens + 7, "bcd"), (400, "d")):
            server.engine.capacity = dataclasses.replace(full, max_seq_len=room)
            answer = post(http, **fields, truncation="auto")
            assert answer.json()["truncation"] == "auto"
            text = server.engine.texts[-1]
            begun = turn("system", "Be brief.") + turn("user", f"Question {left[0]}")
            assert text.startswith(begun)
            assert text.count("Question") == text.count("<tool_response>") == len(left)
        # Where not even the last turn fits, and where nothing was asked for, nothing is left out.
        for truncation in ("auto", "disabled"):
            server.engine.capacity = dataclasses.replace(full, max_seq_len=60)
            post(http, **fields, truncation=truncation)
            assert server.engine.texts[-1].count("Question") == 4
    finally:
        server.engine.capacity = full


HOSTED_ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
    {"type": "computer_call", "id": "cu_1", "call_id": "c", "action": {"type": "wait"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": [{"type": "logs"}]},
    {"type": "image_generation_call", "id": "ig_1", "result": "x"},
    {"type": "local_shell_call", "id": "ls_1", "call_id": "c", "action": {"type": "exec"}},
    {"type": "local_shell_call_output", "id": "ls_1", "output": "x"},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]},
    {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file"}},
    {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
    {"type": "mcp_list_tools", "id": "ml_1", "server_label": "m", "tools": []},
    {"type": "mcp_approval_request", "id": "ma_1", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "ma_1", "approve": True},
    {"type": "mcp_call", "id": "mc_1", "name": "f", "arguments": "{}", "output": None},
    {"type": "tool_search_call", "id": "ts_1", "arguments": {"query": "x"}},
    {"type": "tool_search_output", "id": "ts_1", "tools": [CLOCK]},
    {"type": "additional_tools", "role": "developer", "tools": [CLOCK]},
    {"type": "program", "id": "p_1", "code": "x", "call_id": "c"},
    {"type": "program_output", "id": "p_1", "call_id": "c", "result": "x"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
    {"type": "compaction_trigger"},
]


def test_items_of_hosted_tools_are_left_out_of_the_history(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    first = post(http, input=[user("Hi"), *HOSTED_ITEMS, said("Hello."), user("Bye")]).json()
    expected = turn("user", "Hi") + turn("assistant", "Hello.") + turn("user", "Bye")
    assert server.engine.texts[-1] == expected + "<|im_start|>assistant\n"
    post(http, previous_response_id=first["id"])  # they are kept as they came
    assert server.engine.texts[-1].startswith(expected)


def test_every_type_of_item_that_the_client_knows_is_known_here(described: Any) -> None:
    item = described["components"]["schemas"]["InputItem"]["properties"]["type"]
    [known] = [set(each["enum"]) for each in item["anyOf"] if "enum" in each]
    theirs = {
        kind
        for struct in get_args(get_args(ResponseInputItem)[0])
        for kind in get_args(struct.model_fields["type"].annotation)
        if isinstance(kind, str)
    }
    assert {"shell_call", "mcp_call"} <= theirs <= known


@pytest.mark.parametrize("written", ODD_ARGUMENTS)
def test_every_answer_is_taken_back_as_input(
    server: Served[ScriptedEngine], client: openai.OpenAI, ask: Any, written: str
) -> None:
    shown = hermes("get_weather", {"input": written})
    for fields in ({}, {"max_output_tokens": 30}, {"max_output_tokens": 5}):
        found = ask(f"{THOUGHT}{hermes('get_weather', written)}", tools=TOOLS, **fields)
        asked: Any = [user("How is Köln?"), *(item.model_dump() for item in found.output)]
        client.responses.create(model="fake", input=asked, tools=TOOLS)
        assert fields or shown in server.engine.texts[-1]


# -- fields ----------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


def test_parse_and_stream_return_objects_of_a_schema(
    server: Served[ScriptedEngine], client: openai.OpenAI
) -> None:
    server.engine.answers, server.engine.run = [THOUGHT + '{"name": "Ada", "age": 36}'], 1
    parsed = client.responses.parse(model="fake", input="Who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(model="fake", input="Who?", text_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)
    assert {"response.output_text.delta", "response.reasoning_text.delta"} <= kinds
    tool: Any = openai.pydantic_function_tool(Person)["function"]
    server.engine.answers = [hermes("Person", {"name": "Ada", "age": 36})]
    called = client.responses.parse(
        model="fake", input="Who?", tools=[{"type": "function", **tool}], tool_choice="required"
    )
    assert called.output[0].parsed_arguments == {"name": "Ada", "age": 36}


def test_formats_and_choices_hold_the_answer(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    """The engine refuses an answer that its mask forbids."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"text": {"format": {"type": "json_object"}}}, '{"b": 1}', "no"),
        ({"text": {"format": named}}, '{"a": 1}', '{"b": 1}'),
        ({"tools": TOOLS, "tool_choice": "required"}, CALL, "no"),
        # A format beside a forced call is one of texts, of which there are none.
        ({"text": {"format": named}, "tools": TOOLS, "tool_choice": "required"}, CALL, '{"a": 1}'),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "clock"}},
            hermes("clock", {}),
            CALL,
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "name": "note"}},
            hermes("note", {"input": "x"}),
            CALL,
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "clock"}],
                },
            },
            hermes("clock", {}),
            CALL,
        ),
        (
            {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"},
            CALL,
            f"{CALL}\n{CALL}",
        ),
        (
            {
                "tools": [
                    {
                        **NOTE,
                        "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]+"},
                    }
                ]
            },
            hermes("note", {"input": "ab"}),
            hermes("note", {"input": "abc"}),
        ),
    ]
    for fields, good, bad in cases:
        server.engine.answers = [good]
        post(http, **fields)
        server.engine.answers = [bad]
        response = http.post("/v1/responses", json={"input": "Hi", **fields})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_failed")


def test_null_in_any_field_is_as_if_it_was_left_out(
    server: Served[ScriptedEngine], http: httpx.Client, described: Any
) -> None:
    server.engine.answers = ["Yes."]
    fields = described["components"]["schemas"]["ResponsesRequest"]["properties"]
    nothing = dict.fromkeys(fields, None)
    body = {**nothing, "input": "Hi"}
    assert http.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"] == "Yes."


def test_what_is_large_or_deep_is_read_or_refused(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    deep = "[" * 100_000
    # (Input, status.)
    cases: list[tuple[list[Any], int]] = [
        ([said("x")] * 8192, 200),
        ([called("c")] * 1000, 200),
        ([called("c", arguments=deep)], 200),  # shown to the model as a text
        ([said("x")] * 8193, 400),
        ([user("x")] * 100_000, 413),
    ]
    for items, status in cases:
        assert http.post("/v1/responses", json={"input": items}).status_code == status
    post(http)


def test_fields_of_chats_have_their_effect_or_are_refused(
    server: Served[ScriptedEngine], http: httpx.Client, ask: Any
) -> None:
    server.engine.answers = ["It rains at noon."]
    [item] = post(http, stop=["noon"]).json()["output"]
    assert item["content"][0]["text"] == "It rains at "
    assert ask("yes", structured_outputs={"choice": ["yes", "no"]}).output_text == "yes"
    refused = http.post("/v1/responses", json={"input": "Hi", "structured_outputs": {"regex": "x"}})
    assert refused.json()["error"]["code"] == "grammar_failed"
    post(http, logit_bias={"5": 3}, bad_words=["no"], ignore_eos=True, min_tokens=2)
    params = server.engine.streams[-1].params
    assert (params.logit_bias, params.bad_words) == ({5: 3}, ("no",))
    assert (params.ignore_eos, params.min_tokens) == (True, 2)


def test_effort_and_template_options_reach_the_template(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["Yes."]
    post(http, reasoning={"effort": "none"})
    assert server.engine.template_options["enable_thinking"] is False
    post(http, reasoning={"effort": "high"}, chat_template_kwargs={"a": 1})
    assert server.engine.template_options["enable_thinking"] is True
    assert {"reasoning_effort", "a"} <= server.engine.template_options.keys()
    assert post(http, tools=TOOLS, tool_choice="none").json()["tools"] == []
    assert "tools" not in server.engine.template_options


def test_tools_that_the_server_does_not_run_are_left_out_and_logged(
    server: Served[ScriptedEngine],
    client: openai.OpenAI,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.engine.answers = ["Yes."]
    odd: Any = [
        SEARCH,
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "shell"}]},
        {"type": "mcp", "server_label": "m", "server_url": "http://x", "require_approval": "never"},
        {"type": "sEcReT", "parameters": 3, "name": None},
    ]
    with caplog.at_level(logging.INFO):
        response = client.responses.create(model="fake", input="Hi", tools=[*odd, CLOCK])
    assert [tool.type for tool in response.tools] == ["namespace", "function"]
    assert "does not run: mcp, others, shell, web_search" in caplog.text
    assert "sEcReT" not in caplog.text
    assert client.responses.create(model="fake", input="Hi", tools=odd).output_text == "Yes."
    assert client.responses.create(model="fake", input="Hi", tools=[]).tools == []


SPACED: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "shell"}, WEATHER, NOTE, {**CLOCK, "name": "wait"}],
}
OTHER: Any = {"type": "namespace", "name": "other", "tools": [{**CLOCK, "name": "wait"}]}


def test_tools_in_a_namespace_are_called_by_flat_names_and_come_back_with_their_namespace(
    ask: Any, server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    written = hermes("crm__get_weather", {"city": "Köln", "days": 2})
    noted = hermes("crm__note", {"input": "x"})
    response = ask(f"{written}\n{noted}\n{hermes('clock', {})}", tools=[SPACED, CLOCK])
    assert [(item.name, item.namespace) for item in response.output] == [
        ("get_weather", "crm"),
        ("note", "crm"),
        ("clock", None),
    ]
    assert response.output[0].arguments == ARGUMENTS and response.output[1].input == "x"
    [space, clock] = response.model_dump(mode="json", exclude_unset=True)["tools"]
    echoed = [{**WEATHER, "strict": None}, NOTE, {**CLOCK, "name": "wait"}]
    assert space == {**SPACED, "tools": echoed}
    assert clock["name"] == "clock"
    text = server.engine.texts[-1]
    assert '"name": "crm__wait"' in text and text.count("crm: Customers.") == 1
    [*_, done] = [
        event
        for event in events_of(post(http, tools=[SPACED], stream=True))
        if event["type"] == "response.function_call_arguments.done"
    ]
    assert done["name"] == "clock"


@pytest.mark.parametrize("namespace", [{"namespace": "crm"}, {}])
def test_calls_of_tools_in_a_namespace_are_taken_back(
    server: Served[ScriptedEngine], http: httpx.Client, namespace: dict[str, str]
) -> None:
    server.engine.answers = ["Yes."]
    history = [user("Hi"), {**called("c"), **namespace}, returned("c", "rain")]
    post(http, input=history, tools=[SPACED, CLOCK])
    assert WRITTEN.replace("get_weather", "crm__get_weather") in server.engine.texts[-1]


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ({"type": "function", "name": "crm__wait"}, "crm__wait", "clock"),
        ({"type": "function", "name": "wait", "namespace": "other"}, "other__wait", "crm__wait"),
        ({"type": "function", "name": "get_weather"}, "crm__get_weather", "clock"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "namespace", "name": "other"},
                    {"type": "function", "name": "clock"},
                ],
            },
            "other__wait",
            "crm__wait",
        ),
    ],
)
def test_a_tool_choice_names_tools_in_a_namespace(
    server: Served[ScriptedEngine], http: httpx.Client, choice: dict[str, Any], good: str, bad: str
) -> None:
    arguments = {"city": "Köln"} if "weather" in good else {}
    server.engine.answers = [hermes(good, arguments)]
    fields = {"tools": [SPACED, OTHER, CLOCK], "tool_choice": choice}
    assert post(http, **fields).json()["tool_choice"] == choice
    server.engine.answers = [hermes(bad, {})]
    response = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_failed")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "namespace", "tools": [CLOCK]}]}, "tools[0].name"),
    ({"tools": [{**SPACED, "tools": [SEARCH, {"type": "function"}]}]}, "tools[0].tools[1].name"),
    ({"tools": [CLOCK, {**SPACED, "tools": [NOTE, NOTE]}]}, "tools[1].tools[1].name"),
    ({"tools": [SPACED] * 2}, "tools[1].tools[1].name"),
    (
        {
            "tools": [
                {**OTHER, "tools": [{**CLOCK, "parameters": {"type": "x"}, "strict": True}]},
                SEARCH,
            ]
        },
        "tools[0].tools[0].parameters",
    ),
    ({"tools": [{**OTHER, "name": str(n), "tools": [CLOCK] * 600} for n in range(2)]}, "tools"),
    (
        {"tools": [SPACED, OTHER], "tool_choice": {"type": "function", "name": "wait"}},
        "tool_choice.name",
    ),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    (
        {
            "input": [
                user("x"),
                {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            ]
        },
        "input[1].content[0].type",
    ),
    (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_file", "file_id": "x"},
                    ],
                }
            ]
        },
        "input[0].content[1].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [returned("c", [{"type": "input_image", "image_url": "x"}])]},
        "input[0].output[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{"type": "some_call", "id": "x"}]}, "input[0].type"),
    ({"input": [returned("c", 3)]}, "input[0].output"),
    ({"input": [{**called("c"), "arguments": 3}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"previous_response_id": 1}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True, "store": False}, "background"),
    ({"background": 1}, "background"),
    ({"truncation": "some"}, "truncation"),
    ({"moderation": {}}, "moderation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_logprobs": 129}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
        "text.format.schema",
    ),
    (
        {
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}},
            "tools": TOOLS,
            "tool_choice": "required",
        },
        "text.format.schema",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [SEARCH, CLOCK, CLOCK]}, "tools[2].name"),
    ({"tools": [SEARCH, {**CLOCK, "parameters": []}]}, "tools[1].parameters"),
    (
        {"tools": [SEARCH, {**CLOCK, "parameters": {"type": "x"}, "strict": True}]},
        "tools[1].parameters",
    ),
    (
        {
            "tools": [
                SEARCH,
                {**NOTE, "format": {"type": "grammar", "syntax": "regex", "definition": "["}},
            ]
        },
        "tools[1].format.definition",
    ),
    (
        {"tools": [{**NOTE, "format": {"type": "grammar", "syntax": "regex"}}]},
        "tools[0].format.definition",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "g"}],
            },
        },
        "tool_choice.tools[1].name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_an_error_names_the_field_of_this_api(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        body = {"input": "Hi", "stream": stream, **fields}
        response = http.post("/v1/responses", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert error["message"].startswith(f"{param}: ") or error["code"] is not None


def test_errors_say_what_to_send_instead(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "input": "Hi"}
    for fields, words in (
        ({"conversation": "conv_1"}, "whole conversation in input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes text only"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.responses.create(**{**asked, **fields})
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hi")


# -- agents ----------------------------------------------------------------------------------------


def codex_body() -> dict[str, Any]:
    """A request as Codex sends it, in shape and size, in its second turn."""

    def function(name: str, num_words: int, **properties: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "name": name,
            "description": "word " * num_words,
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties][:1],
                "additionalProperties": False,
            },
        }

    def text(role: str, *num_words: int) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": "<word>\n" * count} for count in num_words]
        return {
            "type": "message",
            "id": f"msg_{role}{num_words[0]}",
            "role": role,
            "content": parts,
        }

    string = {"type": "string", "description": "word " * 15}
    number = {"type": "number", "description": "word " * 15}
    nested = {"type": "array", "items": {"type": "object", "properties": {"a": string}}}
    return {
        "model": "fake",
        "stream": True,
        "input": [
            text("developer", 2400),
            text("developer", 300, 50),
            text("user", 60),
            text("user", 8),
            {**THOUGHTS, "encrypted_content": None},
            said("One moment.", id="msg_3", status="completed"),
            {
                **called("call_1", "exec_command", '{"cmd": "ls"}'),
                "id": "fc_1",
                "status": "completed",
            },
            {**returned("call_1", "Chunk ID: 1\nOutput:\na.txt\n"), "id": "fco_1"},
        ],
        "tools": [
            function(
                "exec_command",
                15,
                cmd=string,
                tty={"type": "boolean"},
                max_output_tokens=number,
                prefix_rule={"type": "array", "items": string},
                sandbox_permissions={**string, "enum": ["use_default", "require_escalated"]},
            ),
            function("write_stdin", 15, session_id=number, chars=string),
            function("update_plan", 90, plan=nested, explanation=string),
            function("request_user_input", 25, questions=nested),
            function("view_image", 25, path=string),
            function("list_resources", 25, server=string, cursor=string),
            function("read_resource", 25, server=string, uri=string),
            {
                "type": "namespace",
                "name": "agents",
                "description": "word",
                "tools": [
                    function(f"agent_{n}", 300, target=string, items=nested) for n in range(6)
                ],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a20515-d504-7be2-b63f-ed6f3f8783dd",
        "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"a": 1}'},
    }


def test_a_request_of_codex_is_answered_even_with_strict_fields() -> None:
    body = codex_body()
    assert 35_000 < len(json.dumps(body)) < 50_000
    with scripted(strict_fields=True, api_key=("k",)) as server, server.http() as http:
        call = hermes("exec_command", {"cmd": "cat a.txt"})
        server.engine.answers = [f"{THOUGHT}Let me see.\n{call}"]
        response = http.post("/v1/responses", json=body, headers={"authorization": "Bearer k"})
        events = events_of(response)
        done = [event["item"]["type"] for event in events if event["type"].endswith("item.done")]
        assert done == ["reasoning", "message", "function_call"]
        assert streamed_response(events)["output"][2]["arguments"] == '{"cmd": "cat a.txt"}'
        unknown = http.post(
            "/v1/responses", json={**body, "x": 1}, headers={"authorization": "Bearer k"}
        )
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "x")
        assert http.post("/v1/responses", json=body).status_code == 401
        assert 'route="/v1/responses"' in http.get("/metrics").text
