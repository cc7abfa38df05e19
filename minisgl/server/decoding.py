"""Decodes a JSON body into a request; an invalid one becomes an error that names the field."""

from __future__ import annotations

from types import NoneType
from typing import TypeVar

import msgspec
from msgspec import Struct

from minisgl.errors import CallerError, InvalidRequestError
from minisgl.server.validation_errors import GOT_FLOAT, NOT_SUPPORTED, field_error

Body = TypeVar("Body", bound=Struct)


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decode `body`; raises InvalidRequestError with the path of the field, or CallerError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _decode_again(body, kind, str(error))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _decode_again(body: bytes, kind: type[Body], complaint: str) -> Body:
    """Look for a better error than the first one that the decoder found, and for integers as 5.0.

    An unsupported field explains more than the fields that come with it, as `tools` with
    `tool_choice`; and 5.0 is an integer in JSON Schema.
    """
    refusal = field_error(complaint, kind)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for field in msgspec.structs.fields(kind):
            if field.type is NoneType and bytes(fields.get(field.name, b"null")) != b"null":
                raise InvalidRequestError(field.name, f"{NOT_SUPPORTED}.")
        if GOT_FLOAT not in complaint:
            raise refusal
        values = {name: _with_integers(msgspec.json.decode(raw)) for name, raw in fields.items()}
    except msgspec.ValidationError:  # not an object, or a number out of range
        raise refusal from None
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None


def _with_integers(value: object) -> object:
    """Convert whole floats to integers, in lists too. No nested object has an integer field."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return [*map(_with_integers, value)] if isinstance(value, list) else value


def _not_json(error: Exception) -> CallerError:
    return CallerError(f"The body is not valid JSON: {error}")
