"""The Messages API over a socket, through HTTP and the real `anthropic` client, on an engine that
answers with given texts."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import anthropic
import httpx
import msgspec
import openai
import pytest
from anthropic.types.beta import BetaContentBlock
from pydantic import BaseModel
from support.agent_bodies import claude_code_body
from support.fake_engine import FakeEngine
from support.gated_runner import gated_server
from support.http_server import http_client
from support.messages_api import (
    assembled,
    checked_error,
    checked_message,
    events_of,
    without_ids,
)
from support.scripted_engine import DEAF_TEMPLATE, QWEN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, served
from support.tool_cases import ODD_ARGUMENTS, hermes
from support.waiting import until

from minisgl.server.apis.messages.reply import RAW_INPUT, SIGNATURE
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.hosts import Hosts

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
QUESTION = [{"role": "user", "content": "How is the weather in Köln?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
ADAPTIVE = {"type": "adaptive"}
CALL = hermes("get_weather", {"city": "Köln", "days": 2})
THOUGHT = "<think>\nA city.\n</think>\n\n"


class Warmer(BaseModel):
    city: str
    certain: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(qwen())

    with served(start) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Served[ScriptedEngine]) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Served[ScriptedEngine]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as found:
        yield found


def asked(**fields: Any) -> dict[str, Any]:
    request = {"model": "fake", "messages": QUESTION, "max_tokens": 1000, "thinking": ADAPTIVE}
    request |= {"tools": [WEATHER, CLOCK], **fields}
    return {name: value for name, value in request.items() if value is not ...}


def ask(
    server: Served[ScriptedEngine], http: httpx.Client, answer: str, **fields: Any
) -> dict[str, Any]:
    """The answer, whole and streamed in runs of tokens of several lengths: always the same."""
    engine, request = server.engine, asked(**fields)
    engine.answers, engine.run, engine.chance = [answer], 1, None
    whole = without_ids(checked_message(http.post(PATH, json=request).json()))
    for run, chance in [
        (1, None),
        (2, None),
        (1000, None),
        *((9, random.Random(n)) for n in "abcd"),
    ]:
        engine.run, engine.chance = run, chance
        events = events_of(http.post(PATH, json={**request, "stream": True}).text)
        streamed = without_ids(assembled(events))
        for block, other in zip(streamed["content"], whole["content"], strict=True):
            if RAW_INPUT in other.get("input", ()):  # of which a stream has the beginning
                given = block["input"].get(RAW_INPUT, "")
                assert other["input"][RAW_INPUT].startswith(given)
                block["input"] = other["input"]
        assert {**streamed, "usage": whole["usage"]} == whole
        if "stop_sequences" not in fields:  # a run may have tokens after one
            assert streamed["usage"] == whole["usage"]
    return whole


def check_not_held(answer: httpx.Response) -> dict[str, str]:
    """Returns the error of an answer that its constraint could not hold any further."""
    error = checked_error(answer.json())
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("The answer cannot be constrained any further: ")
    return error


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}  # not `"citations": null`, which is no list


def thinking(thought: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought, "signature": SIGNATURE}


def tool_use(name: str, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "", "name": name, "input": input}


CALLED = tool_use("get_weather", {"city": "Köln", "days": 2})

# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "content", "reason"),
    [
        ("It rains. 👍🏽", [text("It rains. 👍🏽")], "end_turn"),
        ("", [text("")], "end_turn"),
        (THOUGHT, [thinking("A city."), text("")], "end_turn"),
        (THOUGHT + "It rains.", [thinking("A city."), text("It rains.")], "end_turn"),
        (CALL, [CALLED], "tool_use"),
        (
            f"{THOUGHT}Let me see.\n{CALL}\n{hermes('clock', {})}\n{CALL}",
            [thinking("A city."), text("Let me see."), CALLED, tool_use("clock", {}), CALLED],
            "tool_use",
        ),
        (f"I look.\n{CALL}\nDone.", [text("I look."), CALLED, text("Done.")], "tool_use"),
        # Letter for letter, whatever is in the texts of an input.
        (
            hermes("f", r'{"a":"mkdir {a,b \"\\ </b> \u00e9 é 👍🏽", "b": 12345678901234567890}'),
            [tool_use("f", {"a": 'mkdir {a,b "\\ </b> é é 👍🏽', "b": 12345678901234567890})],
            "tool_use",
        ),
        # What is no object is passed on under a name that no tool knows, not run.
        (
            hermes("f", '{"a": tru, "b": 1}'),
            [tool_use("f", {RAW_INPUT: '{"a": tru, "b": 1}'})],
            "max_tokens",
        ),
        (hermes("f", "[1]"), [tool_use("f", {RAW_INPUT: "[1]"})], "max_tokens"),
        (
            '<tool_call>{"name": "f", "arguments": {"a":',
            [tool_use("f", {RAW_INPUT: '{"a":'})],
            "max_tokens",
        ),
        (hermes("f", '{"a": NaN}'), [tool_use("f", {RAW_INPUT: '{"a": NaN}'})], "max_tokens"),
    ],
)
def test_an_answer_has_the_same_blocks_whole_and_streamed(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    answer: str,
    content: list[Any],
    reason: str,
) -> None:
    found = ask(server, http, answer)
    assert (found["content"], found["stop_reason"]) == (content, reason)
    assert found["stop_sequence"] is None


@pytest.mark.parametrize(
    ("fields", "answer", "reason", "last"),
    [
        ({"max_tokens": 3}, "It rains at noon.", "max_tokens", text("It ")),
        ({"max_tokens": 3}, THOUGHT, "max_tokens", thinking("A")),
        (
            {"stop_sequences": ["noon", "."]},
            "It rains at noon.",
            "stop_sequence",
            text("It rains at "),
        ),
        ({"stop_sequences": []}, "It rains.", "end_turn", text("It rains.")),
        ({"stop_sequences": ["city"]}, CALL, "tool_use", CALLED),  # arguments are no text
        ({"tools": ...}, "It rains.", "end_turn", text("It rains.")),
        ({"tools": []}, CALL, "end_turn", text(CALL)),
        ({"tool_choice": {"type": "none"}}, CALL, "end_turn", text(CALL)),
    ],
)
def test_the_stop_reason_says_why_an_answer_ended(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    fields: dict[str, Any],
    answer: str,
    reason: str,
    last: dict[str, Any],
) -> None:
    found = ask(server, http, answer, **fields)
    assert (found["stop_reason"], found["content"][-1]) == (reason, last)
    assert found["stop_sequence"] == ("noon" if reason == "stop_sequence" else None)


def test_fields_of_chats_have_their_effect(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    server.engine.answers = ["It rains."]
    assert http.post(PATH, json=asked(stop="rain")).json()["content"] == [text("It ")]
    fields = {"seed": 7, "logit_bias": {"5": 3}, "structured_outputs": {"choice": ["yes", "no"]}}
    assert ask(server, http, "yes", **fields)["content"] == [text("yes")]
    params = server.engine.streams[-1].params
    assert (params.seed, params.logit_bias) == (7, {5: 3})
    check_not_held(http.post(PATH, json=asked(structured_outputs={"regex": "x"})))


def test_a_call_that_was_cut_is_not_run(server: Served[ScriptedEngine], http: httpx.Client) -> None:
    found = ask(server, http, CALL, max_tokens=42)
    [cut] = found["content"]
    assert found["stop_reason"] == "max_tokens"
    assert [*cut["input"]] == [RAW_INPUT] and cut["input"][RAW_INPUT].startswith('{"city"')


@pytest.mark.parametrize(
    ("written", "input"),
    [
        ('{"city": "Köln", "days": 2 3}', {"city": "Köln", "days": 2}),
        ('{"city": tru}', {}),
        ('{"city": "Köln",}', {"city": "Köln"}),
        (r'{"city": "Köln\ud800"}', {}),
        ("{'city': 1}", {}),
        ("[1]", {}),
    ],
)
def test_a_stream_has_the_client_parse_nothing_but_the_beginning_of_an_object(
    server: Served[ScriptedEngine], client: anthropic.Anthropic, written: str, input: dict[str, Any]
) -> None:
    server.engine.answers = [f"{hermes('get_weather', written)}\nDone."]
    with client.messages.stream(**asked(thinking={"type": "disabled"})) as stream:
        message = stream.get_final_message()
    call, done = message.content
    assert (call.type, call.input) == ("tool_use", input)
    assert (done.text, message.stop_reason) == ("Done.", "max_tokens")


def test_max_tokens_are_shortened_to_the_room_and_the_stop_reason_says_so(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    engine = server.engine
    prompt = http.post(COUNT, json=asked(max_tokens=...)).json()["input_tokens"]
    large, engine.capacity = engine.capacity, replace(engine.capacity, max_seq_len=prompt + 5)
    try:
        found = ask(server, http, "It rains at noon.", max_tokens=32_000)
        assert found["stop_reason"] == "model_context_window_exceeded"
        assert found["usage"]["output_tokens"] == 5
        assert ask(server, http, "It rains at noon.", max_tokens=5)["stop_reason"] == "max_tokens"
    finally:
        engine.capacity = large


def test_usage_counts_thinking_within_the_output(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    usage = ask(server, http, THOUGHT + "It rains.")["usage"]
    count = http.post(COUNT, json=asked(max_tokens=...)).json()["input_tokens"]
    sizes = [len(server.engine.tokenizer.encode(part)) for part in (THOUGHT, THOUGHT + "It rains.")]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == sizes[1] + 1  # the end
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] <= sizes[0]


# -- thinking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "shown", "switch"),
    [
        ({}, [], False),  # as at Anthropic, who does not ask for it gets none
        ({"thinking": None}, [], False),
        ({"thinking": {"type": "disabled"}}, [], False),
        ({"output_config": {"effort": "high"}}, [], False),
        ({"thinking": ADAPTIVE}, [thinking("A city.")], None),
        ({"thinking": {"type": "between_tools"}}, [thinking("A city.")], None),
        ({"thinking": ADAPTIVE, "output_config": {"effort": "max"}}, [thinking("A city.")], True),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, [thinking("A city.")], True),
        ({"thinking": {**ADAPTIVE, "display": "summarized"}}, [thinking("A city.")], None),
        ({"thinking": {**ADAPTIVE, "display": "omitted"}}, [thinking("")], None),
    ],
)
def test_thinking_is_asked_for_and_shown_as_the_request_says(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    fields: dict[str, Any],
    shown: list[Any],
    switch: bool | None,
) -> None:
    found = ask(server, http, THOUGHT + "Rain.", **{"thinking": ..., **fields})
    assert found["content"] == [*shown, text("Rain.")]
    assert server.engine.template_options.get("enable_thinking") is switch
    effort = (fields.get("output_config") or {}).get("effort")
    assert server.engine.template_options.get("reasoning_effort") == effort


def test_hidden_thinking_alone_is_an_empty_text(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    assert ask(server, http, THOUGHT, thinking=...)["content"] == [text("")]


def test_the_budget_of_thinking_is_kept(server: Served[ScriptedEngine], http: httpx.Client) -> None:
    budget = {"type": "enabled", "budget_tokens": 2}
    server.engine.answers, server.engine.run, server.engine.chance = [THOUGHT], 1, None
    # The matcher of the scripted engine forces no answer to end its thoughts.
    check_not_held(http.post(PATH, json=asked(thinking=budget)))


# -- the prompt ------------------------------------------------------------------------------------


def prompt_of(server: Served[ScriptedEngine], http: httpx.Client, **fields: Any) -> str:
    """The text of a conversation under the template."""
    answer = http.post(COUNT, json=asked(max_tokens=..., tools=..., **fields))
    assert answer.status_code == 200, answer.text
    return server.engine.texts[-1]


def said(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_instructions_come_as_text_or_blocks_before_and_between_messages(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    question, asks = QUESTION[0], said("user", QUESTION[0]["content"])
    begin = "<|im_start|>assistant\n"
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    for system, messages, expected in (
        (None, [question], asks),
        ("", [question], asks),
        ([], [question], asks),
        ("Be brief.", [question], said("system", "Be brief.") + asks),
        (blocks, [question], said("system", "Be brief.\n\nBe kind.") + asks),
        (
            "A",
            [{"role": "system", "content": "B"}, question],
            said("system", "A\n\nB") + asks,
        ),
        (
            "A",
            [question, {"role": "system", "content": blocks}, {"role": "system", "content": "C"}],
            said("system", "A") + asks + said("system", "Be brief.\n\nBe kind.\n\nC"),
        ),
    ):
        assert prompt_of(server, http, system=system, messages=messages) == expected + begin


@pytest.mark.parametrize(
    ("first", "left"),
    [
        ("x-anthropic-billing-header: cc_version=2.1; cch=1;", "Be brief."),
        ("x-anthropic-billing-header: cch=1;\n", "Be brief."),
        ("x-anthropic-billing-header: cch=1;\n\nBe kind.", "Be kind.\n\nBe brief."),
        ("Not x-anthropic-billing-header", "Not x-anthropic-billing-header\n\nBe brief."),
    ],
)
def test_the_billing_line_of_the_instructions_is_left_out(
    server: Served[ScriptedEngine], http: httpx.Client, first: str, left: str
) -> None:
    system = [{"type": "text", "text": first}, {"type": "text", "text": "Be brief."}]
    assert prompt_of(server, http, system=system).startswith(said("system", left))
    if "\n\n" in left:
        return
    assert prompt_of(server, http, system=first.strip()).startswith("<|im_start|>user")


def test_calls_thoughts_and_results_of_the_history_reach_the_template(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    calls = [
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "id": "b", "name": "clock", "input": {}},
    ]
    parts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}]
    history = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "thinking", "thinking": "A city.", "signature": "s"},
                {"type": "text", "text": "Let me see.", "citations": None},
                *calls,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_result", "tool_use_id": "a", "content": parts},
                {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
            ],
        },
        {"role": "user", "content": "And tomorrow?"},
    ]
    found = prompt_of(server, http, messages=history)
    made = hermes("get_weather", {"city": "Köln"}) + "\n" + hermes("clock", {})
    results = ("rain\n\nwind", "Error: no")
    assert found == (
        said("user", QUESTION[0]["content"])
        + said("assistant", f"<think>\nA city.\n</think>\n\nLet me see.{made}")
        + "".join(said("tool", f"<tool_response>{one}</tool_response>") for one in results)
        + said("user", "Well?\n\nAnd tomorrow?")
        + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("written", [*ODD_ARGUMENTS, "null"])
def test_every_answer_is_taken_back_as_history(
    server: Served[ScriptedEngine], http: httpx.Client, written: str
) -> None:
    """Whole ones, and what a client may make of the pieces of a stream."""
    server.engine.answers = [hermes("f", written)]
    body = asked()
    raw = http.post(PATH, json=body).content
    content = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])["content"]
    streamed = b'[{"type":"tool_use","id":"a","name":"f","input":%s}]'
    pieces = msgspec.json.encode(written), b"null" if "\\" in written else written.encode()
    is_json = written not in ODD_ARGUMENTS[:1] and "NaN" not in written
    for blocks in (bytes(content), *(streamed % piece for piece in pieces[: 1 + is_json])):
        said = b'{"role":"assistant","content":%s}' % blocks
        messages = b"[%s,%s]" % (msgspec.json.encode(QUESTION[0]), said)
        sent = msgspec.json.encode({**body, "messages": msgspec.Raw(messages)})
        answer = http.post(PATH, content=sent, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        shown = server.engine.texts[-1]
        assert "input" in shown or RAW_INPUT in shown or hermes("f", {}) in shown


def test_blocks_of_tools_that_anthropic_runs_are_left_out(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    said_before = {"role": "assistant", "content": [search, result, {"type": "text", "text": "A"}]}
    found = prompt_of(server, http, messages=[*QUESTION, said_before, *QUESTION])
    assert said("assistant", "A") in found and "search" not in found
    quoted = {
        "type": "search_result",
        "source": "https://example.org",
        "title": "Rain",
        "content": [{"type": "text", "text": "It rains."}],
    }
    found = prompt_of(server, http, messages=[{"role": "user", "content": [quoted]}])
    assert said("user", "Rain\nhttps://example.org\nIt rains.") in found


def test_every_block_of_an_answer_of_anthropics_is_taken_back(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    # In a conversation that goes on here.
    kinds, _ = get_args(BetaContentBlock)
    known = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(kinds)}
    assert known > {"fallback", "compaction"}
    refused = {"container_upload"}  # a file
    for kind in known - refused - {"text", "thinking", "tool_use"}:
        said_before = [{"type": kind, "content": "summary"}, {"type": "text", "text": "B"}]
        messages = [*QUESTION, {"role": "assistant", "content": said_before}, *QUESTION]
        found = prompt_of(server, http, messages=messages)
        assert said("assistant", "summaryB" if kind == "compaction" else "B") in found, kind


def test_a_last_message_of_the_assistant_is_continued(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It"}]
    found = ask(server, http, " rains.", messages=begun)
    assert found["content"] == [text(" rains.")]
    assert server.engine.texts[-1].endswith("<|im_start|>assistant\nIt")
    # With nothing to continue it is not there, and after a call the results are.
    for content in ("", []):
        said_nothing = [*QUESTION, {"role": "assistant", "content": content}]
        found = prompt_of(server, http, messages=said_nothing)
        assert found == prompt_of(server, http)


async def test_instructions_between_messages_are_the_users_where_a_template_refuses_them() -> None:
    refusing = "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    refusing += "{{ raise_exception('no') }}{% endif %}" + QWEN_TEMPLATE
    engine = ScriptedEngine(qwen(refusing))
    late = [*QUESTION, {"role": "system", "content": "Be brief."}]
    async with http_client(engine) as client:
        answer = await client.post(COUNT, json=asked(max_tokens=..., tools=..., messages=late))
        assert answer.status_code == 200
    expected = said("user", QUESTION[0]["content"] + "\n\nBe brief.")
    assert engine.texts[-1] == expected + "<|im_start|>assistant\n"
    await engine.close()


@pytest.mark.parametrize("field", ["logprobs", "return_token_ids"])
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_what_an_answer_cannot_have_is_refused(path: str, field: str, http: httpx.Client) -> None:
    options = {"max_tokens": ...} if path == COUNT else {}
    answer = http.post(path, json=asked(**options, **{field: True}))
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]
    assert http.post(COUNT, json=asked(max_tokens=..., **{field: False})).status_code == 200


def test_the_tools_are_in_the_prompt_with_their_schemas(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    http.post(COUNT, json=asked(max_tokens=...))
    first = json.loads(server.engine.texts[-1].split("\n")[1])
    assert first["function"]["parameters"] == WEATHER["input_schema"]
    assert first["function"]["description"] == WEATHER["description"]
    counts = [
        http.post(COUNT, json=asked(max_tokens=..., tools=tools)).json()["input_tokens"]
        for tools in ([], [WEATHER], [WEATHER, CLOCK])
    ]
    assert counts == sorted({*counts})


# -- tools and formats -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "answer", "obeyed"),
    [
        ({"type": "any"}, CALL, True),
        ({"type": "any"}, "No.", False),
        ({"type": "any"}, f"{CALL}\n{CALL}", True),
        ({"type": "any", "disable_parallel_tool_use": True}, f"{CALL}\n{CALL}", False),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, f"{CALL}\n{CALL}", False),
        ({"type": "auto"}, "No.", True),
        ({"type": "tool", "name": "clock"}, hermes("clock", {}), True),
        ({"type": "tool", "name": "clock"}, CALL, False),
    ],
)
def test_the_answer_is_held_to_the_tool_choice(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    choice: dict[str, Any],
    answer: str,
    obeyed: bool,
) -> None:
    server.engine.answers, server.engine.run, server.engine.chance = [answer], 1, None
    request = asked(tool_choice=choice)
    whole = http.post(PATH, json=request)
    last = events_of(http.post(PATH, json={**request, "stream": True}).text)[-1]
    if obeyed:
        assert whole.status_code == 200
        checked_message(whole.json())
        assert last == {"type": "message_stop"}
    else:  # the failure is the last event
        assert check_not_held(whole) == checked_error(last)


def test_strict_tools_hold_their_input_to_the_schema(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    closed = {**WEATHER["input_schema"], "additionalProperties": False}
    strict = [{**WEATHER, "type": "custom", "strict": True, "input_schema": closed}]
    assert ask(server, http, CALL, tools=strict)["content"] == [CALLED]
    server.engine.answers = [hermes("get_weather", {"city": 3})]
    check_not_held(http.post(PATH, json=asked(tools=strict)))
    assert http.post(PATH, json=asked()).status_code == 200


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_answer_is_held_to_the_format(
    server: Served[ScriptedEngine], http: httpx.Client, field: str
) -> None:
    format = {"type": "json_schema", "schema": Warmer.model_json_schema()}
    fields: Any = {field: {"format": format} if field == "output_config" else format}
    good = '{"city": "Rome", "certain": true}'
    found = ask(server, http, THOUGHT + good, tools=..., **fields)
    assert found["content"] == [thinking("A city."), text(good)]
    assert ask(server, http, CALL, **fields)["content"] == [CALLED]  # tools go first
    server.engine.answers = ["No."]
    check_not_held(http.post(PATH, json=asked(**fields)))
    forced: Any = {**fields, "tool_choice": {"type": "any"}}
    assert ask(server, http, CALL, **forced)["content"] == [CALLED]
    server.engine.answers = [good]
    check_not_held(http.post(PATH, json=asked(**forced)))


def test_tools_that_anthropic_runs_are_left_out_and_counted_in_the_log(
    server: Served[ScriptedEngine], http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    theirs = [
        {"type": "web_search_20250305", "name": "secret_search", "max_uses": 3},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "secret"},
    ]
    servers = [{"type": "url", "url": "https://example.org/secret", "name": "secret"}]
    tools = [theirs[0], WEATHER, *theirs[1:]]
    found = ask(server, http, CALL, tools=tools, mcp_servers=servers)
    assert found["content"] == [CALLED]
    assert "4 tools that this server does not run are left out" in caplog.text
    assert "secret" not in caplog.text and "secret" not in server.engine.texts[-1]
    assert ask(server, http, "Hm.", tools=theirs)["content"] == [text("Hm.")]


@pytest.mark.parametrize(
    ("kind", "name", "good", "bad"),
    [
        ("bash_20250124", "bash", {"command": "ls"}, {"cmd": "ls"}),
        (
            "text_editor_20250124",
            "str_replace_editor",
            {"command": "undo_edit", "path": "/a"},
            {"command": "insert", "path": "/a", "insert_text": "x"},
        ),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
            {"command": "undo_edit", "path": "/a"},
        ),
        (
            "memory_20250818",
            "memory",
            {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
            {"command": "forget", "path": "/memories/a"},
        ),
    ],
)
def test_tools_that_anthropic_defines_and_the_client_runs_are_functions(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    kind: str,
    name: str,
    good: dict[str, Any],
    bad: dict[str, Any],
) -> None:
    tools = [{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "tool", "name": name}}
    [block] = ask(server, http, hermes(name, good), **fields)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, good)
    [schema] = [json.loads(line) for line in server.engine.texts[-1].split("\n") if name in line]
    assert schema["function"]["description"]
    server.engine.answers = [hermes(name, bad)]
    check_not_held(http.post(PATH, json=asked(**fields)))


# -- errors ----------------------------------------------------------------------------------------


def block(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [*QUESTION, {"role": "user", "content": [text("a"), {"type": kind, **fields}]}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": ...}, "messages: is missing."),
        ({"messages": []}, "messages: must not be empty."),
        ({"messages": "a"}, "messages: must be a list, not a text."),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages: must have a message of"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: must have a message of"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: must not be empty."),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content: must be a text or",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages.0.role: cannot be 'tool'; all",
        ),
        ({"messages": block("text")}, "messages.1.content.1.text: is missing."),
        (
            {"messages": block("audio")},
            "messages.1.content.1.type: cannot be 'audio', because",
        ),
        (
            {"messages": block("image", **IMAGE)},
            "messages.1.content.1.type: cannot be an image, because this model",
        ),
        (
            {"messages": block("document", source={"type": "base64", "data": "AA=="})},
            "messages.1.content.1.source.type: cannot be 'base64'; allowed: text or content",
        ),
        (
            {"messages": block("tool_result", tool_use_id="a", content=[text("a"), IMAGE])},
            "messages.1.content.1.content.1.type: cannot be an image, because this model",
        ),
        (
            {"messages": block("tool_use", id="a", name="f", input={})},
            "messages.1.content.1: is only allowed in a message of the assistant.",
        ),
        (
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
                ]
            },
            "messages.1.content.0: is only allowed in a message of the user.",
        ),
        ({"system": 5}, "system: must be a text or a list, not an integer."),
        ({"system": [IMAGE]}, "system.0.type: cannot be 'image'"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1."),
        ({"max_tokens": "5"}, "max_tokens: must be an integer, not a text."),
        ({"temperature": 3}, "temperature: "),
        ({"top_p": -1}, "top_p: "),
        ({"top_k": -5}, "top_k: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: must not be empty."),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: must have at most 16 entries."),
        ({"stop_sequences": "a"}, "stop_sequences: must be a list, not a text."),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop: is not allowed beside stop_sequences."),
        ({"cache_salt": ""}, "cache_salt: must not be empty."),
        ({"response_format": {"type": "json_object"}}, "response_format: is not supported"),
        ({"logprobs": True}, "logprobs: is not supported"),
        ({"n": 2}, "n: "),
        ({"thinking": {"type": "on"}}, "thinking.type: cannot be 'on'; allowed: adaptive"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: must be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: cannot be 'huge'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema: ",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "number", "not": {}}}},
            "output_format.schema: ",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: is missing."),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name: is missing."),
        ({"tools": [{"name": "f", "input_schema": None}]}, "tools.0.input_schema: is missing."),
        (
            {"tools": [{"name": "f", "input_schema": [1]}]},
            "tools.0.input_schema: must be an object",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "s"}, {**CLOCK, "name": "a b"}]},
            "tools.1.name: must have 1 to 128 characters",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools.1.name: is the name of another tool as well."),
        (
            {
                "tools": [{**CLOCK, "strict": True, "input_schema": {"type": "object", "not": {}}}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema: ",
        ),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: cannot be 'required'; allowed:"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is missing."),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: is the name of none"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice: asks for a call, and there"),
    ],
)
def test_an_error_names_the_field_of_this_api(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    answer = http.post(PATH, json=asked(**fields))
    assert answer.status_code == 400
    error = checked_error(answer.json())
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(message)
    assert answer.headers["request-id"] == answer.json()["request_id"]


async def test_a_prompt_without_room_is_too_long_in_the_words_that_clients_look_for() -> None:
    request = asked(tools=..., messages=[{"role": "user", "content": "a" * 50}])
    async with http_client(FakeEngine(max_seq_len=50)) as client:
        error = checked_error((await client.post(PATH, json=request)).json())
        count = (await client.post(COUNT, json=request)).json()["input_tokens"]
    assert count >= 50
    assert error["message"] == f"prompt is too long: {count} tokens > 49 maximum"


@pytest.mark.parametrize(
    ("request_", "status", "type"),
    [
        ({"json": asked(model="other")}, 404, "not_found_error"),
        ({"json": asked(), "headers": {"x-api-key": "wrong"}}, 401, "authentication_error"),
        ({"json": asked(), "headers": {"host": "evil.example"}}, 403, "permission_error"),
        ({"content": "{", "headers": {"content-type": "application/json"}}, 400, None),
        ({"content": "{}"}, 400, None),
        ({"json": asked(system="a" * (17 << 20))}, 413, "request_too_large"),
        ({"method": "GET"}, 405, None),
        ({"url": "/v1/messages/batches", "json": {}}, 404, "not_found_error"),
    ],
)
async def test_every_error_of_these_paths_has_anthropics_envelope(
    request_: dict[str, Any], status: int, type: str | None
) -> None:
    app = create_app(EngineState(ServerConfig(api_key=("secret",)), FakeEngine()), Hosts(["test"]))
    headers = {"x-api-key": "secret", "x-request-id": "mine", **request_.get("headers", {})}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        asked_for = {"method": "POST", "url": PATH, **request_, "headers": headers}
        answer = await client.request(**asked_for)
        assert answer.status_code == status
        assert checked_error(answer.json())["type"] == (type or "invalid_request_error")
        assert answer.json()["request_id"] == "mine"
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
        # Other paths keep OpenAI's.
        other = await client.get("/v1/messagesx", headers=headers)
        assert [*other.json()] == ["error"] and "request-id" not in other.headers


async def test_a_server_that_is_not_ready_is_overloaded() -> None:
    async with http_client(None) as client:
        answer = await client.post(PATH, json=asked())
        assert answer.status_code == 529
        assert checked_error(answer.json())["type"] == "overloaded_error"
        metrics = (await client.get("/metrics")).text
        assert 'minisgl_http_responses_total{route="/v1/messages",status="529"} 1.0' in metrics


async def test_a_full_queue_is_a_rate_limit() -> None:
    async with gated_server(max_running_requests=1, max_queued_requests=1) as gated:
        gated.runner.close_gate()
        url = f"http://127.0.0.1:{gated.port}"
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as other,
        ):
            streams = [
                await other.completions.create(model="gated", prompt=[n], max_tokens=2, stream=True)
                for n in (10, 11)
            ]
            with pytest.raises(anthropic.RateLimitError) as caught:
                await client.messages.create(
                    model="gated", max_tokens=1, messages=[{"role": "user", "content": "a"}]
                )
            assert caught.value.response.headers["retry-after"] == "1"
            for stream in streams:
                await stream.close()
        gated.runner.open()


def test_a_template_without_tools_refuses_them_by_name() -> None:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(qwen(DEAF_TEMPLATE))

    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    with served(start) as server, server.http() as http:
        for fields, field in (
            ({"tools": [CLOCK]}, "tools: "),
            (
                {"tools": [], "messages": [{"role": "user", "content": [result]}]},
                "messages.0.content.0: ",
            ),
            (
                {"tools": [], "messages": [*QUESTION, {"role": "assistant", "content": [call]}]},
                "messages.1.content.0: ",
            ),
        ):
            answer = http.post(PATH, json=asked(**fields))
            assert checked_error(answer.json())["message"].startswith(field)


async def test_unknown_fields_are_errors_only_with_strict_fields() -> None:
    for strict in (False, True):
        engine = ScriptedEngine(qwen())
        async with http_client(engine, strict_fields=strict) as client:
            known = await client.post(PATH, json={**claude_code_body("Hello?"), "stream": False})
            assert known.status_code == 200, known.text
            for path in (PATH, COUNT):
                answer = await client.post(path, json=asked(colour="red"))
                assert answer.status_code == (400 if strict else 200)
                if strict:
                    assert checked_error(answer.json())["message"].startswith(
                        "colour: is not known"
                    )
        await engine.close()


# -- clients ---------------------------------------------------------------------------------------


def test_a_turn_of_claude_code_with_a_call_and_its_result(
    server: Served[ScriptedEngine], http: httpx.Client
) -> None:
    line = {"command": "cat word.txt"}
    server.engine.answers = [f"{THOUGHT}One moment.\n{hermes('Bash', line)}", "It is: rain."]
    server.engine.run, server.engine.chance = 3, None
    assert http.head("/").status_code == 200
    body = claude_code_body("Which word is in the file?")
    assert 75_000 < len(json.dumps(body)) < 85_000
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}

    def turn() -> dict[str, Any]:
        answer = http.post(f"{PATH}?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return assembled(events_of(answer.text))

    first = turn()
    made = {"type": "tool_use", "id": first["content"][-1]["id"], "name": "Bash", "input": line}
    assert first["content"] == [thinking("A city."), text("One moment."), made]
    assert first["stop_reason"] == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": made["id"],
        "content": "rain\n",
        "is_error": False,
        "cache_control": {"type": "ephemeral"},
    }
    body["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    before = server.engine.texts[-1]
    assert turn()["content"] == [text("It is: rain.")]
    after = server.engine.texts[-1]
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))  # so it is cached
    assert after.endswith(
        "<tool_response>rain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert "billing" not in after
    assert http.post(COUNT, json={**body, "max_tokens": None}).json()["input_tokens"] > 10_000


async def test_a_changing_billing_line_does_not_spoil_the_prefix_cache() -> None:
    async with gated_server() as gated:
        url = f"http://127.0.0.1:{gated.port}"
        async with httpx.AsyncClient(base_url=url) as client:

            async def cached(first: str) -> int:
                body = {
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": "hi"}],
                    "system": [
                        {"type": "text", "text": first},
                        {"type": "text", "text": "be brief and kind " * 20},
                    ],
                }
                answer = await client.post(PATH, json=body)
                usage = checked_message(answer.json())["usage"]
                assert usage["input_tokens"] > 0
                return int(usage["cache_read_input_tokens"])

            header = "x-anthropic-billing-header: cc_version=2.1.100; cch="
            assert await cached(f"{header}1;") == 0
            assert await cached(f"{header}2;") > 100
            assert await cached("a") < await cached("a")  # found only where it is the same
            assert await cached("b") < 100


def test_the_client_creates_streams_and_counts(
    server: Served[ScriptedEngine], client: anthropic.Anthropic
) -> None:
    server.engine.answers, server.engine.run, server.engine.chance = [THOUGHT + CALL], 2, None
    request: Any = asked()
    found = client.messages.create(**request)
    assert [block.type for block in found.content] == ["thinking", "tool_use"]
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "input_json", "content_block_stop"} <= {*kinds}
    assert without_ids(final.model_dump()) == without_ids(
        {**found.model_dump(), "content": [block.model_dump() for block in found.content]}
    )
    del request["max_tokens"]
    assert client.messages.count_tokens(**request).input_tokens == found.usage.input_tokens


@pytest.mark.parametrize(("field", "wrong"), [("temperature", -5.0), ("structural_tag", 0)])
def test_tokens_are_counted_for_requests_that_may_be_sent(
    http: httpx.Client, field: str, wrong: float
) -> None:
    response = http.post(COUNT, json=asked(max_tokens=..., **{field: wrong}))
    assert response.status_code == 400 and field in response.json()["error"]["message"]


def test_the_client_parses_a_structured_answer(
    server: Served[ScriptedEngine], client: anthropic.Anthropic
) -> None:
    server.engine.answers = ['{"city": "Rome", "certain": true}']
    request: Any = asked(tools=..., thinking=...)
    parsed = client.messages.parse(**request, output_format=Warmer)
    assert parsed.parsed_output == Warmer(city="Rome", certain=True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_tool_runner_completes_a_turn(
    server: Served[ScriptedEngine], client: anthropic.Anthropic, stream: bool
) -> None:
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a place."""
        cities.append(city)
        return f"rain in {city}"

    calls = hermes("get_weather", {"city": "Köln"}) + "\n" + hermes("get_weather", {"city": "Ulm"})
    server.engine.answers, server.engine.run = [calls, "It rains."], 1
    runner: Any = client.beta.messages.tool_runner(
        model="fake", max_tokens=1000, messages=QUESTION, tools=[get_weather], stream=stream
    )
    final = runner.until_done()
    assert final.content[0].text == "It rains."
    assert cities == ["Köln", "Ulm"]
    assert "<tool_response>rain in Ulm</tool_response>" in server.engine.texts[-1]
    # The client keeps its messages here if it can; it is told to send them all.
    assert QUESTION[0]["content"] in server.engine.texts[-1]
    assert calls in server.engine.texts[-1]


def test_the_client_raises_its_own_errors(
    server: Served[ScriptedEngine], client: anthropic.Anthropic
) -> None:
    for fields, kind in (
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
    ):
        request: Any = asked(**fields)
        with pytest.raises(kind) as caught:
            client.messages.create(**request)
        assert isinstance(caught.value, anthropic.APIStatusError)
        assert caught.value.request_id
        assert next(iter(fields)) in str(caught.value)
    server.engine.answers = ["No."]
    request = asked(tool_choice={"type": "any"})
    with (
        pytest.raises(anthropic.APIStatusError, match="cannot be constrained"),
        client.messages.stream(**request) as stream,
    ):
        stream.until_done()


async def test_a_client_that_leaves_ends_its_answer(server: Served[ScriptedEngine]) -> None:
    server.engine.answers, server.engine.run, server.engine.chance = [CALL * 2000], 1, None
    request: Any = asked(max_tokens=90_000)
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="x") as client,
        client.messages.stream(**request) as stream,
    ):
        async for _ in stream:
            break
    await until(lambda: server.engine.streams[-1].aborted)
