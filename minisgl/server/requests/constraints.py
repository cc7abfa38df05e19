"""Reads the constraint of a request from its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from minisgl.errors import InvalidRequestError
from minisgl.request import StructuredOutput
from minisgl.server.requests.constraint_types import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    StructuralTagFormat,
    StructuredFields,
)
from minisgl.server.requests.request_types import GenerationRequest
from minisgl.server.requests.tools import MAX_SCHEMA_BYTES

# What makes a schema: keywords with a schema, with a list of them, and with schemas by name.
SCHEMA_KEYS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
LIST_KEYS = ("anyOf", "allOf", "oneOf", "prefixItems")
NAMED_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def constraint_of(body: GenerationRequest) -> StructuredOutput | None:
    """The constraint of a request; raises InvalidRequestError for more than one."""
    found = [*_constraints(body)]
    if len(found) > 1:
        first, second = (constraint.field for constraint in found[:2])
        raise InvalidRequestError(
            second, f"is a second constraint, beside {first}; a request may have one."
        )
    return found[0] if found else None


def _constraints(body: GenerationRequest) -> Iterator[StructuredOutput]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    if _given(body.json_schema):
        schema = _schema(body.json_schema, "json_schema")
        yield StructuredOutput(json_schema=schema, field="json_schema")
    if _given(body.structural_tag):
        tag = _tag(body.structural_tag, "structural_tag")
        yield StructuredOutput(structural_tag=tag, field="structural_tag")


def _response_format(format: ResponseFormat) -> Iterator[StructuredOutput]:
    name = "response_format"
    match format:
        case JsonObjectFormat(schema=schema):
            if _given(schema):
                field = f"{name}.schema"
                yield StructuredOutput(json_schema=_schema(schema, field), field=field)
            else:
                yield StructuredOutput(json_object=True, field=name)
        case JsonSchemaFormat(json_schema=named, schema=schema):
            given = named or NamedSchema(schema=schema)
            field = f"{name}.json_schema.schema" if named else f"{name}.schema"
            if not (named or _given(schema)):
                raise InvalidRequestError(f"{name}.json_schema", "is missing.")
            if _given(given.schema):
                text, strict = _schema(given.schema, field), bool(given.strict)
                yield StructuredOutput(json_schema=text, strict=strict, field=field)
            else:
                yield StructuredOutput(json_object=True, field=field)
        case StructuralTagFormat(structures=structures, triggers=triggers):
            parts = {"structures": structures, "triggers": triggers}
            tag = msgspec.json.encode(parts).decode()
            yield StructuredOutput(structural_tag=tag, field=name)


def _structured_outputs(given: StructuredFields) -> StructuredOutput:
    name = "structured_outputs"
    tag = None
    if _given(given.structural_tag):
        tag = _tag(given.structural_tag, f"{name}.structural_tag")
    schema = _schema(given.json, f"{name}.json") if _given(given.json) else None
    if schema is not None and given.disable_additional_properties:
        schema = _closed(schema, f"{name}.json")
    constraints: dict[str, tuple[str, Any]] = {
        "json": ("json_schema", schema),
        "json_object": ("json_object", given.json_object or None),
        "regex": ("regex", given.regex),
        "choice": ("choice", given.choice),
        "grammar": ("grammar", given.grammar),
        "structural_tag": ("structural_tag", tag),
    }
    chosen = [member for member, (_, value) in constraints.items() if value is not None]
    if len(chosen) != 1:
        found = f"{len(chosen)} were given: {', '.join(chosen)}" if chosen else "none was given"
        raise InvalidRequestError(name, f"takes one of {', '.join(constraints)}; {found}.")
    kind, value = constraints[chosen[0]]
    return StructuredOutput(
        **{kind: value},
        whitespace_pattern="" if given.disable_any_whitespace else given.whitespace_pattern,
        field=f"{name}.{chosen[0]}",
    )


def _given(raw: Raw | None) -> bool:
    return bytes(raw or b"null") != b"null"


def _schema(raw: Raw | None, field: str) -> str | bool:
    """A schema as JSON text."""
    text = _json(raw, field)
    if text in ("true", "false"):
        return text == "true"
    if not text.lstrip().startswith("{"):
        raise InvalidRequestError(field, "must be a JSON schema: an object, or its JSON text.")
    return text


def _tag(raw: Raw | None, field: str) -> str:
    text = _json(raw, field)
    if not text.lstrip().startswith("{"):
        raise InvalidRequestError(field, "must be an object, or its JSON text.")
    return text


def _json(raw: Raw | None, field: str) -> str:
    """The JSON of a value, of which a text may be the only content."""
    data = bytes(raw or b"")
    if len(data) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(field, f"has more than {MAX_SCHEMA_BYTES} bytes.")
    return msgspec.json.decode(data, type=str) if data.startswith(b'"') else data.decode()


def _closed(schema: str | bool, field: str) -> str | bool:
    """The schema without properties that it does not list, unless it says which."""
    if isinstance(schema, bool):
        return schema
    try:
        return msgspec.json.encode(_without_others(msgspec.json.decode(schema))).decode()
    except (ValueError, RecursionError):
        raise InvalidRequestError(field, "is not valid JSON, or nested too deeply.") from None


def _without_others(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in SCHEMA_KEYS:
            closed[key] = _without_others(value)
        elif key in LIST_KEYS and isinstance(value, list):
            closed[key] = [*map(_without_others, value)]
        elif key in NAMED_KEYS and isinstance(value, dict):
            closed[key] = {name: _without_others(inner) for name, inner in value.items()}
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
