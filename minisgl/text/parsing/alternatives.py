"""The schemas of which a value satisfies one, without references and combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.text.parsing.xml_format import resolved, types_of_constant

TYPES = ("string", "array", "object", "number", "integer", "boolean", "null")
COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


def alternatives(root: Mapping[str, Any], schema: object) -> list[Mapping[str, Any]]:
    """The alternatives of `schema`, a part of `root`. A reference to itself is left out."""
    return [*_alternatives(root, schema, frozenset())]


def _alternatives(
    root: Mapping[str, Any], schema: object, followed: frozenset[str]
) -> list[Mapping[str, Any]]:
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    found = [{key: value for key, value in schema.items() if key not in COMBINED}]
    match schema.get("$ref"):
        case str(reference) if reference in followed:
            return []
        case str(reference):
            followed |= {reference}
            target = root if reference == "#" else resolved(root, reference)
            found = _both(found, _alternatives(root, target, followed))
    for part in schema.get("allOf") or ():
        found = _both(found, _alternatives(root, part, followed))
    for options in filter(None, map(schema.get, ("anyOf", "oneOf"))):
        either = [each for part in options for each in _alternatives(root, part, followed)]
        found = _both(found, either)
    return found


def _both(
    some: list[Mapping[str, Any]], others: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The alternatives of two schemas that hold both."""
    pairs = ((one, other) for one in some for other in others)
    return [_merged(one, other) for one, other in pairs if types_in(one) & types_in(other)]


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        match key, one[key], other[key]:
            case "required", [*some], [*more]:
                merged[key] = [*some, *more]
            case "properties", {**some}, {**more}:
                merged[key] = some | more
                for name in some.keys() & more.keys():
                    merged[key][name] = {"allOf": [some[name], more[name]]}
            case "type", _, _:
                merged[key] = sorted(types_in(one) & types_in(other))
            case (("minimum" | "minLength" | "minItems"), a, b):
                merged[key] = max(a, b)
            case (("maximum" | "maxLength" | "maxItems"), a, b):
                merged[key] = min(a, b)
    return merged


def types_in(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema without combinations allows."""
    match schema.get("type"):
        case str(kind):
            types = {kind}
        case [*kinds]:
            types = {*map(str, kinds)}
        case _:
            return {*TYPES}
    return types | {"integer"} if "number" in types else types


def constants(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema without combinations lists; none where it lists none."""
    match schema:
        case {"const": value}:
            return [value]
        case {"enum": [*values]}:
            return values
        case _:
            return []


def known_types(schemas: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The types of the values of `schemas`; none where one of them does not say."""
    types: set[str] = set()
    for schema in schemas:
        if values := constants(schema):
            types.update(*map(types_of_constant, values))
        elif "type" in schema:
            types |= types_in(schema)
        else:
            return frozenset()
    return frozenset(types)
