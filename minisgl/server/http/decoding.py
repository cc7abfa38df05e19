"""Decodes a JSON body into a request; an invalid one becomes an error that names the field."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
from msgspec import Raw, Struct, inspect

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.server.http.validation_errors import GOT_FLOAT, alternatives, field_error

Body = TypeVar("Body", bound=Struct)
# What a field that holds integers may look like, texts aside.
Integers = int | list[int | list[int]] | None
# Integers may be written as 5.0 in fields up to this size in all, and in so many lists: looking at
# them blocks the loop for some 50 ms.
MAX_FLOATS_BYTES = 512 << 10
MAX_LISTS = 2048
# Commas in a field whose object has a largest number of keys. Each key takes half a microsecond of
# the loop before they are counted.
MAX_COMMAS = 1 << 14


def decode(body: bytes, kind: type[Body], *, strict: bool = False) -> Body:
    """Decode `body`; raises InvalidRequestError with the path of the field, or CallerError.

    strict: unknown fields are errors.
    """
    if strict:
        kind = cast("type[Body]", _strict(kind))
    try:
        if body.count(b",") > MAX_COMMAS:
            _check_objects(body, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _decode_again(body, kind, str(error))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


@functools.cache
def _strict(kind: type[Struct]) -> type[Struct]:
    return msgspec.defstruct(kind.__name__, (), bases=(kind,), forbid_unknown_fields=True)


def _check_objects(body: bytes, kind: type[Body]) -> None:
    """Refuse an object with far more keys than its field takes, before they are decoded.

    An invalid body is not looked at.
    """
    outline = _outline(kind)
    try:
        fields = msgspec.json.decode(body, type=outline.raw_kind)
    except msgspec.ValidationError:
        return
    for name in outline.with_few_keys:
        if bytes(getattr(fields, name) or b"").count(b",") > MAX_COMMAS:
            raise InvalidRequestError(name, f"must have at most {MAX_COMMAS} commas.")


def _decode_again(body: bytes, kind: type[Body], complaint: str) -> Body:
    """Look for a better error than the first one that the decoder found, and for integers as 5.0.

    An unsupported field explains more than the fields that come with it, as `tools` with
    `tool_choice`; and 5.0 is an integer in JSON Schema.
    """
    outline = _outline(kind)
    try:
        fields = {
            name: raw
            for name, raw in msgspec.structs.asdict(
                msgspec.json.decode(body, type=outline.raw_kind)
            ).items()
            if raw is not None
        }
        for name, instead in outline.unsupported.items():
            if bytes(fields.get(name, b"null")) != b"null":
                raise InvalidRequestError(name, f"is not supported; {instead}.")
        if GOT_FLOAT not in complaint:
            raise field_error(complaint, kind)
        room = MAX_FLOATS_BYTES
        held = {name: bytes(fields[name]) for name in outline.with_integers & fields.keys()}
        for name, value in sorted(held.items(), key=lambda item: len(item[1])):
            room -= len(value)
            if room >= 0:
                fields[name] = Raw(_without_floats(value))
        return msgspec.json.decode(msgspec.json.encode(fields), type=kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


@dataclass(frozen=True, slots=True)
class _Outline:
    """What the second look needs to know of a type of body."""

    raw_kind: type[Struct]  # the same fields, none of them decoded
    unsupported: Mapping[str, str]  # and what to do instead
    with_integers: frozenset[str]
    with_few_keys: tuple[str, ...]


@functools.cache
def _outline(kind: type[Struct]) -> _Outline:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return _Outline(
        msgspec.defstruct(
            kind.__name__,
            [(field.name, Raw, None) for field in info.fields],
            forbid_unknown_fields=info.forbid_unknown_fields,
        ),
        {
            field.name: field.type.extra["instead"]
            for field in info.fields
            if isinstance(field.type, inspect.Metadata) and field.type.extra
        },
        frozenset(field.name for field in info.fields if _holds_integers(field.type)),
        tuple(field.name for field in info.fields if _has_few_keys(field.type)),
    )


def _holds_integers(type: inspect.Type) -> bool:
    """Whether a value has integers, in lists too. Nested objects do not count."""
    return any(
        isinstance(each, inspect.IntType)
        or (isinstance(each, inspect.ListType) and _holds_integers(each.item_type))
        for each in alternatives(type)
    )


def _has_few_keys(type: inspect.Type) -> bool:
    """Whether a value is an object whose number of keys is limited. Not logit_bias, whose keys
    stay texts: as it has a description, it is wrapped once more."""
    if isinstance(type, inspect.UnionType):
        return any(map(_has_few_keys, type.types))
    return isinstance(type, inspect.DictType) and type.max_length is not None


def _without_floats(value: bytes) -> bytes:
    """Write 5.0 as 5, unless something else than numbers and lists is there as well."""
    # The conversion is not strict, so that it would take texts for integers as well.
    if b'"' in value or value.count(b"[") > MAX_LISTS:
        return value
    try:
        # The library's own parser takes microseconds for a number such as 1e308.
        integers = msgspec.convert(json.loads(value), Integers, strict=False)
    except (ValueError, RecursionError):  # a fraction, or more than 64 bits
        return value
    return msgspec.json.encode(integers)


def _not_json(error: Exception) -> CallerError:
    what = "The body is not valid JSON"
    return CallerError(f"{what}: {error}", logged=what)
