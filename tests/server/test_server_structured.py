"""Constraints of chats and completions, on an engine whose answers are checked against them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
import openai
import pytest
from pydantic import BaseModel
from support.scripted_engine import PLAIN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, served
from support.tool_cases import CLOCK, QUESTION, WEATHER, hermes
from support.waiting import LIMIT_S

from minisgl.errors import QueueFullError
from minisgl.text.tokenizer import Tokenizer

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
GOOD, BAD = '{"city": "Köln"}', '{"town": "Köln"}'
# Not enforced: whether the names are words.
ODD_SCHEMA: Any = {**SCHEMA, "propertyNames": {"pattern": "secret"}}
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'


class City(BaseModel):
    city: str
    population: int | None


@contextlib.contextmanager
def scripted(tokenizer: Tokenizer) -> Iterator[Served[ScriptedEngine]]:
    async def start() -> ScriptedEngine:
        return ScriptedEngine(tokenizer)

    with served(start) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Served[ScriptedEngine]]:
    with scripted(qwen()) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Served[ScriptedEngine]) -> Iterator[httpx.Client]:
    with server.http() as found:
        yield found


def post(
    server: Served[ScriptedEngine], http: httpx.Client, answer: str, path: str, **fields: Any
) -> httpx.Response:
    server.engine.answers = [answer]
    prompt: Any = {"messages": QUESTION} if "chat" in path else {"prompt": "a", "max_tokens": 100}
    return http.post(path, json={**prompt, **fields})


def json_format(schema: Any, **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def legacy_tag() -> Any:
    structure = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
    return {"structures": [structure], "triggers": ["<f"]}


CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": json_format(SCHEMA)}, GOOD, BAD),
    ({"response_format": json_format(SCHEMA, strict=True)}, GOOD, BAD),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, BAD, "[]"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GOOD, BAD),
    ({"response_format": {"type": "json_object"}}, BAD, "yes"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GOOD, BAD),
    ({"response_format": {"type": "structural_tag", **legacy_tag()}}, f"a<f>{GOOD}</f>", "<f>no"),
    ({"structured_outputs": {"json": SCHEMA}}, GOOD, BAD),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, "12", "yes"),
    ({"structured_outputs": {"json_object": True}}, BAD, "yes"),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc", "abcd"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "perhaps"),
    ({"structured_outputs": {"grammar": GBNF}}, "no", "perhaps"),
    ({"structured_outputs": {"structural_tag": legacy_tag()}}, f"a<f>{GOOD}</f>", "<f>no"),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        '{"city":"Köln"}',
        '{"city":  "Köln"}',
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\s{2}"}},
        '{"city":\t "Köln"}',
        '{"city": "Köln"}',
    ),
    (
        {
            "structured_outputs": {
                "json": {"properties": {"a": {"properties": {"b": {}}}}, "type": "object"},
                "disable_additional_properties": True,
            }
        },
        '{"a": {"b": 1}}',
        '{"a": {"c": 1}}',
    ),
    ({"json_schema": SCHEMA}, GOOD, BAD),
    ({"json_schema": '{"type": "integer"}'}, "12", "x"),
    ({"structural_tag": legacy_tag()}, f"a<f>{GOOD}</f>", "<f>no"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS)
def test_each_constraint_holds_the_answer(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    path: str,
    fields: dict[str, Any],
    good: str,
    bad: str,
) -> None:
    found = post(server, http, good, path, **fields)
    assert found.status_code == 200, found.text
    choice = found.json()["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert (text, choice["finish_reason"]) == (good, "stop")
    assert post(server, http, bad, path, **fields).json()["error"]["code"] == "grammar_failed"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": None, "guided_json": None},
    ],
)
def test_values_that_ask_for_nothing_leave_the_answer_free(
    server: Served[ScriptedEngine], http: httpx.Client, fields: dict[str, Any]
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert post(server, http, "yes", path, **fields).status_code == 200
        assert server.engine.streams[-1].matcher is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": SCHEMA, "structural_tag": legacy_tag()}, "structural_tag"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_format(3)}, "response_format.json_schema.schema"),
        (
            {"response_format": json_format({"type": "string", "minLength": 3, "maxLength": 2})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": json_format(ODD_SCHEMA, strict=True)},
            "response_format.json_schema.schema",
        ),
        ({"response_format": json_format({"$ref": "#"})}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "tag"}}},
            "response_format.format",
        ),
        ({"structural_tag": {"structures": []}}, "structural_tag"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named_before_the_answer_begins(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    path: str,
    fields: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    found = post(server, http, "yes", path, stream=stream, **fields)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_are_not_enforced_are_in_a_header_and_in_the_log(
    server: Served[ScriptedEngine],
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO)
    path = "/v1/chat/completions"
    fields: Any = {"response_format": json_format(ODD_SCHEMA), "stream": stream}
    found = post(server, http, GOOD, path, **fields)
    assert found.headers["x-minisgl-ignored-keywords"] == "propertyNames"
    assert "propertyNames" in caplog.text
    assert "secret" not in caplog.text and "city" not in caplog.text
    fields["response_format"] = json_format(SCHEMA)
    assert "x-minisgl-ignored-keywords" not in post(server, http, GOOD, path, **fields).headers


@pytest.mark.parametrize("thinks", [True, False])
def test_parsed_models_through_the_openai_client(
    server: Served[ScriptedEngine], thinks: bool
) -> None:
    thought = "<think>\nIt is {big}.\n</think>\n\n" if thinks else ""
    server.engine.answers = [thought + '{"city": "Köln", "population": null}']
    request: Any = {"model": "fake", "messages": QUESTION, "response_format": City}
    with server.openai() as client:
        found = client.chat.completions.parse(**request).choices[0].message
        assert found.parsed == City(city="Köln", population=None)
        assert (found.model_extra or {}).get("reasoning_content") == (
            "It is {big}." if thinks else None
        )
        with client.chat.completions.stream(**request) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == City(city="Köln", population=None)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**request, max_tokens=9)
        server.engine.answers = [thought + BAD]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.parse(**request)


async def test_choices_share_a_grammar_and_each_has_its_own_matcher(
    server: Served[ScriptedEngine],
) -> None:
    server.engine.answers = ['{"city": "A", "population": 1}', '{"city": "B", "population": 2}']
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        found = await client.chat.completions.parse(
            model="fake", messages=QUESTION, response_format=City, n=2
        )
    parsed = [choice.message.parsed for choice in found.choices]
    assert parsed == [City(city="A", population=1), City(city="B", population=2)]


@pytest.mark.parametrize(
    ("answer", "obeyed"),
    [
        (GOOD, True),
        (hermes("clock", {}), True),
        (f"{hermes('get_weather', {'city': 'a'})}\n{hermes('clock', {})}", True),
        (BAD, False),
        ("I see.", False),
        (GOOD + hermes("clock", {}), False),
    ],
)
@pytest.mark.parametrize("template", ["thinks", "plain"])
def test_with_tools_the_answer_is_calls_or_obeys_the_constraint(
    server: Served[ScriptedEngine],
    plain: Served[ScriptedEngine],
    template: str,
    answer: str,
    obeyed: bool,
) -> None:
    asked = server if template == "thinks" else plain
    fields: Any = {"tools": [WEATHER, CLOCK], "response_format": json_format(SCHEMA)}
    with asked.http() as http:
        found = post(asked, http, answer, "/v1/chat/completions", **fields).json()
    if not obeyed:
        assert found["error"]["code"] == "grammar_failed"
        return
    message = found["choices"][0]["message"]
    assert (message["content"] == GOOD) == ("tool_calls" not in message)


@pytest.mark.parametrize("template", ["thinks", "plain"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_obeys_its_tool_beside_a_constraint(
    server: Served[ScriptedEngine], plain: Served[ScriptedEngine], template: str, choice: Any
) -> None:
    asked = server if template == "thinks" else plain
    call = hermes("get_weather", {"city": "a", "days": 2})
    for wanted in (
        {"response_format": json_format(SCHEMA)},
        {"structured_outputs": {"choice": ["yes"]}},
    ):
        fields: Any = {"tools": [WEATHER, CLOCK], "tool_choice": choice, **wanted}
        with asked.http() as http:
            path = "/v1/chat/completions"
            found = post(asked, http, call, path, **fields).json()["choices"][0]
            assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
            for wrong in (GOOD, "yes", hermes("get_weather", {"town": "a"})):
                error = post(asked, http, wrong, path, **fields).json()["error"]
                assert error["code"] == "grammar_failed"


@pytest.fixture(scope="module")
def plain() -> Iterator[Served[ScriptedEngine]]:
    with scripted(qwen(PLAIN_TEMPLATE)) as found:
        yield found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_takes_its_grammar_out_of_the_line(
    server: Served[ScriptedEngine], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, cancelled = threading.Event(), threading.Event()
    clients: list[str] = []

    async def compile(structured: object, client: str = "") -> NoReturn:
        clients.append(client)
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    monkeypatch.setattr(server.engine, "compile", compile)
    body = {"messages": [{"role": "user", "content": "?"}]} if "chat" in path else {"prompt": "?"}
    with server.http() as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(path, json={**body, "structured_outputs": {"regex": "a+"}}, timeout=1.0)
    assert began.wait(LIMIT_S) and cancelled.wait(LIMIT_S)
    assert clients == [""]


def test_too_many_grammars_in_line_are_a_429(
    server: Served[ScriptedEngine], http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compile(structured: object, client: str = "") -> NoReturn:
        raise QueueFullError("Many grammars wait to be compiled; try again later.")

    monkeypatch.setattr(server.engine, "compile", compile)
    response = http.post(
        "/v1/completions", json={"prompt": "?", "structured_outputs": {"regex": "a+"}}
    )
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "queue_full"
