"""The schemas of which a value satisfies one, without references and combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
TYPES = ("string", "array", "object", "number", "integer", "boolean", "null")
NUMBERS = ("integer", "number")
LISTS = ("allOf", "anyOf", "oneOf")
COMBINED = ("$ref", *LISTS)
# Of two bounds, the one that holds both.
NARROWER: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("minimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "maxLength", "maxItems"), min),
}
MAX_PARTS = 30_000  # of a schema, that are looked at; behind references fewer, as these multiply
MAX_ALTERNATIVES = 200
# Stands for what is not made one schema: the alternative allows more than it should.
UNCOMBINED: Schema = {"allOf": True}


def alternatives(root: Schema, schema: object) -> list[Schema]:
    """The alternatives of `schema`, a part of `root`. A reference to itself is left out."""
    try:
        return _Search(root).alternatives(schema, frozenset())
    except RecursionError:
        return [UNCOMBINED]


class _Search:
    """Looks for the alternatives of one schema, which may have been written to have too many."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = MAX_PARTS

    def alternatives(self, schema: object, followed: frozenset[str]) -> list[Schema]:
        found: list[Schema] = [{}]
        while isinstance(schema, Mapping):
            own = {key: schema[key] for key in schema if key not in COMBINED}
            found = _both(found, [own])
            lists = [parts for keyword in LISTS if (parts := _parts(schema, keyword))]
            reference = schema.get("$ref")
            self._num_left -= 1 if reference is None else MAX_PARTS // MAX_ALTERNATIVES
            if self._num_left <= 0:
                return [UNCOMBINED]
            if reference is None and len(lists) == 1 and len(lists[0]) == 1:
                [[schema]] = lists
                continue
            if isinstance(reference, str):
                if reference in followed:
                    return []
                target = self._root if reference == "#" else _resolved(self._root, reference)
                found = _both(found, self.alternatives(target, followed | {reference}))
            for part in _parts(schema, "allOf"):
                found = _both(found, self.alternatives(part, followed))
            for keyword in ("anyOf", "oneOf"):
                if parts := _parts(schema, keyword):
                    either = [each for part in parts for each in self.alternatives(part, followed)]
                    found = _both(found, either)
            return found
        return [] if schema is False else found


def _parts(schema: Schema, keyword: str) -> Sequence[object]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list | tuple) else ()


def _both(some: list[Schema], others: list[Schema]) -> list[Schema]:
    """The alternatives of two schemas that hold both."""
    if len(some) * len(others) > MAX_ALTERNATIVES:
        return [UNCOMBINED]
    pairs = ((one, other) for one in some for other in others)
    return [_merged(one, other) for one, other in pairs if types_in(one) & types_in(other)]


def _merged(one: Schema, other: Schema) -> Schema:
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        match key, one[key], other[key]:
            case "required", [*some], [*more]:
                merged[key] = [*some, *more]
            case "properties", {**some}, {**more}:
                both = {name: {"allOf": [some[name], more[name]]} for name in some if name in more}
                merged[key] = some | more | both
            case "type", _, _:
                merged[key] = sorted(types_in(one) & types_in(other))
            case "enum", [*some], [*more]:
                merged[key] = [value for value in some if value in more]
            case _, int() | float() as a, int() | float() as b if key in NARROWER:
                merged[key] = NARROWER[key](a, b)
            case "description" | "title" | "default" | "examples", _, _:
                pass
            case _, a, b if a != b:
                merged |= UNCOMBINED
    return merged


def types_in(schema: Schema) -> set[str]:
    """The types that a schema without combinations allows."""
    said = schema.get("type")
    types = {kind for kind in TYPES if kind == said or (isinstance(said, list) and kind in said)}
    return types | {"integer"} if "number" in types else types or {*TYPES}


def properties_of(schema: Schema) -> Schema:
    """The schemas of properties by name; none where a schema has no valid ones."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def constants(schema: Schema) -> list[Any]:
    """The values that a schema without combinations lists; none where it lists none."""
    match schema:
        case {"const": value}:
            return [value]
        case {"enum": [*values]}:
            return values
        case _:
            return []


def known_types(schemas: Sequence[Schema]) -> frozenset[str]:
    """The types of the values of `schemas`; none where one of them does not say."""
    types: set[str] = set()
    for schema in schemas:
        if values := constants(schema):
            types.update(*map(types_of_constant, values))
        else:
            types |= types_in(schema)
    return frozenset() if len(types) == len(TYPES) else frozenset(types)


def types_of_constant(value: object) -> tuple[str, ...]:
    """The types of a value that a schema lists."""
    return ("string",) if isinstance(value, str) else types_of_value(value)


def types_of_value(value: object) -> tuple[str, ...]:
    """The types of a value that a model has written without the quotes of a string."""
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


def _resolved(root: Schema, reference: str) -> object:
    """What a reference into the same schema names, None where there is nothing."""
    place: object = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return None if place is root else place
