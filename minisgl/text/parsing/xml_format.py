"""The JSON of values that a model writes as plain text, by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minisgl.text.parsing.python_format import python_as_json

NUMBERS = ("integer", "number")


def escaped(text: str) -> str:
    """A text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is not a plain string, as `text` has it wherever that is JSON.

    What is of none of `types` is a string; without types, whatever is JSON is taken for it.
    """
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if "null" in types and word.lower() in ("null", "none"):
        return "null"
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if not types & {"object", "array"} or (found := python_as_json(word)) is None:
            return json.dumps(text, ensure_ascii=False)
        word, value = found, json.loads(found)
    if not types or types.intersection(_types_of_value(value)):
        return word
    return json.dumps(text, ensure_ascii=False)


def is_of(text: str, types: frozenset[str]) -> bool:
    """Whether a text is a value of one of `types`, none of which is the string's."""
    if not types or "string" in types:
        return False
    return not value_json(text, types).startswith('"')


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _types_of_value(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return NUMBERS
        case float():
            return NUMBERS if value.is_integer() else ("number",)
        case str():
            return ()  # a plain string is written without quotes
        case list() | tuple():
            return ("array",)
        case _:
            return ("object",)


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the schema of a tool allows for a parameter; none if it does not say."""
    properties = schema.get("properties")
    waiting = [properties.get(name)] if isinstance(properties, Mapping) else []
    followed: set[str] = set()  # references, each once: some refer to themselves
    types: set[str] = set()
    while waiting:
        match waiting.pop():
            case {"type": str(kind)}:
                types.add(kind)
            case {"type": [*kinds]}:
                types.update(kind for kind in kinds if isinstance(kind, str))
            case {"$ref": str(reference)}:
                if reference not in followed:
                    followed.add(reference)
                    waiting.append(resolved(schema, reference))
            case {"anyOf": [*options]} | {"oneOf": [*options]} | {"allOf": [*options]}:
                waiting += options
            case {"enum": [*values]}:
                types.update(*map(types_of_constant, values))
            case {"const": value}:
                types.update(types_of_constant(value))
    return frozenset(types)


def types_of_constant(value: object) -> tuple[str, ...]:
    return ("string",) if isinstance(value, str) else _types_of_value(value)


def resolved(root: Mapping[str, Any], reference: str) -> object:
    """What a reference into the same schema names, None where there is nothing."""
    place: object = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return None if place is root else place
