"""Grammars of values as Gemma 4 writes them, by their JSON schemas.

Keys come in the order in which its chat templates write them, which sort them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from minisgl.errors import InvalidRequestError
from minisgl.grammar.lark import Grammar, Member, string
from minisgl.grammar.plain_texts import NOTHING, limits, text_of
from minisgl.grammar.schema import escaped
from minisgl.grammar.source import inline_schema, literal, schema_options
from minisgl.text.parsing.alternatives import (
    alternatives,
    constants,
    properties_of,
    types_in,
    types_of_constant,
)
from minisgl.text.parsing.gemma_format import QUOTE

PLAIN_KEY = re.compile(r"[^<>{}\[\]:=,\"'\s\/]+")
SCALARS = ("boolean", "integer", "null", "number")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords by the types that they limit, of which the grammar knows nothing.
UNKNOWN = {
    "format": "string",
    **dict.fromkeys(("prefixItems", "additionalItems", "contains", "uniqueItems"), "array"),
    **dict.fromkeys(("patternProperties", "propertyNames", "dependentRequired"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "dependentSchemas"), "object"),
    **dict.fromkeys(("allOf", "not", "if", "unevaluatedProperties", "unevaluatedItems"), ""),
}


class GemmaValues:
    """The rules of the values of one tool, each schema once."""

    def __init__(
        self, grammar: Grammar, name: str, root: Mapping[str, Any], *, field: str, strict: bool
    ) -> None:
        """field: the name of `root` in errors. strict: refuse what the rules cannot hold to."""
        self._grammar, self._name, self._root = grammar, name, root
        self._field, self._strict = field, strict
        self._known: dict[str, str] = {}  # rules by the text of their schemas
        self._num_rules = 0

    def arguments(self) -> str:
        """The rule of the members of the root."""
        either = [
            self._members(part, "") for part in alternatives(self._root, self._root)
            if "object" in types_in(part)
        ]  # fmt: skip
        return self._rule(" | ".join(either) or f"/{NOTHING}/")

    def _rule(self, *parts: str) -> str:
        return self._grammar.rule(self._new_name(), *parts)

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._name}_{self._num_rules}"

    def _value(self, schema: object, place: str) -> str:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            name = self._known[key] = self._new_name()
            parts = alternatives(self._root, schema)
            either = [each for part in parts for each in self._either(part, place)]
            self._grammar.rule(name, " | ".join(either) or f"/{NOTHING}/")
        return self._known[key]

    def _either(self, schema: Mapping[str, Any], place: str) -> Iterator[str]:
        """Expressions for the values of a schema without combinations."""
        types = types_in(schema)
        for keyword, kind in UNKNOWN.items():
            if self._strict and schema.get(keyword) and (not kind or kind in types):
                raise InvalidRequestError(
                    self._field,
                    f"at {place}/{keyword}: cannot be enforced, for the model does not write "
                    "arguments as JSON; leave it out, or do without strict.",
                )
        if values := constants(schema):
            fitting = (value for value in values if types.intersection(types_of_constant(value)))
            yield from (self._grammar.text(written(value)) for value in fitting)
            return
        if "string" in types:
            text = self._grammar.raw_text(self._new_name(), text_of(schema), QUOTE)
            yield f"{self._grammar.text(QUOTE)} {text}"
        if scalars := [kind for kind in SCALARS if kind in types]:
            bounds = {key: schema[key] for key in BOUNDS if key in schema}
            yield inline_schema({"type": scalars, **bounds}, schema_options(strict=False))
        if "array" in types:
            yield f'"[" {self._items(schema, place)} "]"'
        if "object" in types:
            yield f'"{{" {self._members(schema, place)} "}}"'

    def _items(self, schema: Mapping[str, Any], place: str) -> str:
        items = schema.get("items")
        items = {} if items is None or isinstance(items, list) else items
        item = self._value(items, f"{place}/items")
        least, most = limits(schema, "Items")
        if most is not None and most < least:
            return f"/{NOTHING}/"
        if most == 0:
            return ""
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        more = "" if most == 1 else f'("," {item}){{{bounds}}}'
        return f"{item} {more}" if least else f"({item} {more})?"

    def _members(self, schema: Mapping[str, Any], place: str) -> str:
        properties, required = properties_of(schema), schema.get("required")
        required = required if isinstance(required, list) else []
        others = schema.get("additionalProperties", not properties)
        properties = {**{key: {} for key in required if isinstance(key, str)}, **properties}
        members = []
        for key in sorted(properties, key=str.lower):
            inner = f"{place}/properties/{escaped(key)}"
            if not PLAIN_KEY.fullmatch(key):
                raise InvalidRequestError(
                    self._field,
                    f"at {inner}: the model writes names without quotes, where blanks, quotes, "
                    "brackets, commas, colons and = cannot be read; rename it.",
                )
            rule = self._rule(string(f"{key}:"), self._value(properties[key], inner))
            members.append(Member(rule, key in required))
        more = ""
        if others is not False:
            known = "|".join(map(literal, properties))
            key = f"/{PLAIN_KEY.pattern}/" + (f" & ~/(?:{known})/" if known else "")
            terminal = self._grammar.rule(self._new_name().upper(), key)
            value = self._value(others, f"{place}/additionalProperties")
            more = self._rule(terminal, '":"', value)
        return self._grammar.listed(self._new_name(), members, ",", more)


def written(value: object) -> str:
    """A value as the chat templates of Gemma 4 write it."""
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case list() | tuple():
            return f"[{','.join(map(written, value))}]"
        case Mapping():
            members = sorted(value.items(), key=lambda member: str(member[0]).lower())
            return f"{{{','.join(f'{key}:{written(inner)}' for key, inner in members)}}}"
        case _:
            return json.dumps(value)
