"""The table of all request fields in the server's README agrees with the types of requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import request_fields
from pages import with_table
from request_fields import PAGE, effective_fields, in_words, named_bodies, table
from support.written_tables import check_writing

from minisgl.models.generation import GenerationDefaults
from minisgl.server.endpoints import ENDPOINTS
from minisgl.server.requests.chat_messages import Message
from minisgl.server.requests.request_types import ChatRequest, CompletionRequest

NULL = {"type": "null"}


def test_the_page_has_the_table_of_the_types() -> None:
    page = PAGE.read_text()
    written = with_table(page, "request_fields.py", table())
    assert page == written, "run `python scripts/tools/request_fields.py --write`"


def test_the_table_has_every_endpoint_that_takes_a_body() -> None:
    found = named_bodies()
    assert [*found][:4] == ["chat", "completions", "responses", "messages"]
    fields = {name for body in found.values() for name in body.__struct_fields__}
    bodies = [each.body for each in ENDPOINTS if each.body is not None]
    assert fields == {name for body in bodies for name in body.__struct_fields__}
    for name in found:
        assert name in table().replace("all,", "chat, completions, responses, messages,")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "boolean"}, "boolean"),
        ({"anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, NULL]}, "number, 0 to 2"),
        ({"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, "integer, from 1"),
        ({"type": "integer", "minimum": -(2**63)}, "integer"),
        ({"type": "number", "minimum": 1e-6, "maximum": 1e6}, "number, 0.000001 to 1,000,000"),
        ({"type": "string", "minLength": 1, "maxLength": 256}, "text, 1 to 256 characters"),
        ({"enum": ["a", "b"]}, "one of `a`, `b`"),
        ({"enum": ["a"]}, "only `a`"),
        ({"type": ["object", "boolean", "string", "null"]}, "object, boolean or text"),
        (
            {"type": "array", "items": {"$ref": "x"}, "maxItems": 1024},
            "list of up to 1,024 objects",
        ),
        (
            {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "array", "items": {}}]},
            "text, 0 to 9 characters, or list of objects",
        ),
    ],
)
def test_types_are_said_in_words(schema: dict[str, object], words: str) -> None:
    assert in_words(schema) == words


@pytest.mark.parametrize(
    ("name", "kind", "default", "where"),
    [
        ("temperature", "number, 0 to 2", "that of the checkpoint, or 1", "all"),
        ("skip_special_tokens", "boolean", "true", "all"),
        ("max_output_tokens", "integer, from 1", "the room that is left", "responses"),
        ("presence_penalty", "number, -2 to 2", "0", "all"),
        ("truncation", "one of `auto`, `disabled`", "disabled", "responses"),
        ("tokens", "list of integers, from 0", "required", "detokenize"),
    ],
)
def test_a_row_has_type_range_default_and_endpoints(
    name: str, kind: str, default: str, where: str
) -> None:
    [row] = [row for row in table().splitlines() if f"`{name}`" in row.split("|")[1]]
    assert row.endswith(f"| {kind} | {default} | {where} |")


def test_what_is_rejected_or_without_effect_has_no_row() -> None:
    rows = table()
    for name in (
        "stop_regex",
        "best_of",
        "use_beam_search",
        "verbosity",
        "dry_base",
        "mcp_servers",
    ):
        assert f"`{name}`" not in rows


def test_the_said_defaults_are_those_of_requests() -> None:
    defaults = GenerationDefaults(frozenset())
    chat = ChatRequest(messages=[Message(role="user", content="Hello")])
    completion = CompletionRequest(prompt="Hello")
    said = {name: default for _, name, _, default in effective_fields()}
    assert said["n"] == str(chat.num_choices) == str(completion.num_choices)
    assert chat.sampling(defaults).max_tokens is None  # the room that is left
    limit = completion.sampling(defaults).max_tokens
    assert said["max_tokens"] == f"the room that is left; {limit} for /v1/completions"
    assert said["include_reasoning"] == str(chat.wants_reasoning).lower()
    assert said["logprobs"] == "none" and chat.sampling(defaults).logprobs is None
    for name in ("temperature", "presence_penalty"):
        assert said[name].endswith(f"{getattr(chat.sampling(defaults), name):g}")


def test_the_script_names_a_page_that_differs_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writing(request_fields, tmp_path, monkeypatch)
