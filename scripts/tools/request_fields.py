"""Writes the table of all request fields in minisgl/server/README.md from /openapi.json.

python scripts/tools/request_fields.py --write    # after a change of a request's type
python scripts/tools/request_fields.py --check    # exit code 1 if the table differs

Null is allowed everywhere and stands for the default, so neither is said of a field. What is
rejected, or accepted without effect, has no row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from pages import ROOT, as_table, write_or_check_table

from minisgl.request import MAX_INTEGER
from minisgl.server.endpoints import ENDPOINTS
from minisgl.server.openapi import describe

PAGE = ROOT / "minisgl" / "server" / "README.md"

ALL = ("chat", "completions", "responses", "messages")
FIRST = ("model", "messages", "prompt", "input", "instructions", "system", "tokens")
# How descriptions of fields begin that have no effect, or are rejected at all values but one.
WITHOUT_EFFECT = ("Accepted, and", "Left out", "Not supported", "Only ", "Without effect")
# Where the description does not say it; by the field, or endpoint.field.
DEFAULTS = {
    "presence_penalty": "0",
    "frequency_penalty": "0",
    "embeddings.input": "required",
    "tokenize.messages": "required, or `prompt`",
    "tokenize.prompt": "required, or `messages`",
}
# What a schema cannot say, or says at length.
TYPES = {
    "user": "text",
    "embeddings.input": "text, token ids, or a list of either",
    "completions.prompt": "text, token ids, or a list of either",
    "truncate_prompt_tokens": "integer, -1 or from 1",
    "logit_bias": "object: up to 1,024 numbers from -100 to 100 by token id",
    "metadata": "object",
    "seed": "integer of 64 bits",
}


def table() -> str:
    """A row for all fields of the same type, default and endpoints."""
    kinds: dict[tuple[str, str, str], list[str]] = {}  # type and range, where, field
    for endpoint, name, kind, default in effective_fields():
        kinds.setdefault((name, kind, default), []).append(endpoint)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (name, kind, default), endpoints in sorted(kinds.items(), key=_place):
        where = _where(endpoints)
        rows.setdefault((kind, default, where), []).append(f"`{name}`")
    lines = [[", ".join(names), *cells] for cells, names in rows.items()]
    return as_table(["fields", "type and range", "default", "in"], lines)


def _place(entry: tuple[tuple[str, str, str], list[str]]) -> int:
    name = entry[0][0]
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _where(endpoints: list[str]) -> str:
    if not set(ALL) <= set(endpoints):
        return ", ".join(endpoints)
    return ", ".join(["all", *(each for each in endpoints if each not in ALL)])


def effective_fields() -> Iterator[tuple[str, str, str, str]]:
    """The endpoint, name, type and default of each field that has an effect."""
    document = describe(ENDPOINTS, with_key=False)
    for endpoint, body in named_bodies().items():
        schema = document["components"]["schemas"][body.__name__]
        for name, field in schema["properties"].items():
            said = field.get("description", "")
            if said.startswith(WITHOUT_EFFECT):
                continue
            kind = _given(TYPES, endpoint, name) or in_words(field)
            default = said.partition("Default: ")[2].rstrip(".")
            if name in schema.get("required", ()):
                default = "required"
            yield endpoint, name, kind, _given(DEFAULTS, endpoint, name) or default


def named_bodies() -> dict[str, type[Struct]]:
    """The bodies by the names of their endpoints, without those whose fields another has too."""
    found: dict[str, type[Struct]] = {}
    for each in ENDPOINTS:
        name = each.path.removesuffix("/completions") if "chat" in each.path else each.path
        fields = {*each.body.__struct_fields__} if each.body is not None else set()
        if not any(fields <= {*body.__struct_fields__} for body in found.values()):
            assert each.body is not None
            found[name.rpartition("/")[2]] = each.body
    return found


def _given(texts: Mapping[str, str], endpoint: str, name: str) -> str | None:
    return texts.get(f"{endpoint}.{name}", texts.get(name))


# -- types in words --------------------------------------------------------------------------------


def in_words(schema: Mapping[str, Any]) -> str:
    """The type and range of a JSON schema, without null."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if kinds:
        words = dict.fromkeys(in_words(each) for each in kinds)  # alternatives may read the same
        return _either([*words])
    if "const" in schema:
        return _choice([schema["const"]])
    if "enum" in schema:
        return _choice(schema["enum"])
    match schema.get("type"):
        case "array":
            return _list(schema)
        case "string":
            return f"text{_span(schema, 'Length', ' characters')}"
        case "integer" | "number" as kind:
            return f"{kind}{_range(schema)}"
        case "boolean":
            return "boolean"
        case [*several]:
            return _either(["text" if each == "string" else each for each in several[:-1]])
        case _:
            return "object"


def _either(words: list[str]) -> str:
    """Alternatives; a comma parts the last one from such as have commas themselves."""
    link = ", or " if any("," in word for word in words) else " or "
    return link.join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _choice(values: list[Any]) -> str:
    return f"{'only' if len(values) == 1 else 'one of'} {', '.join(f'`{each}`' for each in values)}"


def _list(schema: Mapping[str, Any]) -> str:
    most = f"up to {schema['maxItems']:,} " if "maxItems" in schema else ""
    kind, comma, rest = in_words(schema.get("items", {})).partition(",")
    return f"list of {most}{kind}s{comma}{rest}"


def _span(schema: Mapping[str, Any], what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    return "" if high is None else f", {low or 0} to {high:,}{unit}"


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None or low <= -(2**63):
        return ""
    if high is None or high >= MAX_INTEGER:
        return f", from {_number(low)}"
    return f", {_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def main() -> int:
    return write_or_check_table(__doc__, PAGE, __file__, table)


if __name__ == "__main__":
    sys.exit(main())
