"""The JSON of values that a model writes as plain text, by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minisgl.text.parsing.alternatives import (
    alternatives,
    known_types,
    properties_of,
    types_of_value,
)
from minisgl.text.parsing.emitter import refuse_constant
from minisgl.text.parsing.python_format import python_as_json


def escaped(text: str) -> str:
    """A text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is not a plain string, as `text` has it wherever that is JSON.

    What is of none of `types` is a string, null aside where no string may be; without types,
    whatever is JSON is taken for it.
    """
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    may_be_null = "null" in types or (types and "string" not in types)
    if may_be_null and word.lower() in ("null", "none"):
        return "null"
    try:
        value = json.loads(word, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        if not types & {"object", "array"} or (found := python_as_json(word)) is None:
            return json.dumps(text, ensure_ascii=False)
        word, value = found, json.loads(found)
    if not types or types.intersection(types_of_value(value)):
        return word
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the schema of a tool allows for a parameter; none if it does not say."""
    properties = properties_of(schema)
    if name not in properties:
        return frozenset()
    return known_types(alternatives(schema, properties[name]))
