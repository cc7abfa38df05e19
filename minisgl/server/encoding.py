"""JSON bodies, server-sent events, and errors in OpenAI's envelope."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from minisgl.errors import foreseen
from minisgl.server.schemas import Error, ErrorDetails

DONE = b"data: [DONE]\n\n"
MAX_ERROR_CHARS = 1000  # a message may quote what the caller sent

encode = msgspec.json.Encoder().encode


def event(payload: Struct) -> bytes:
    """One server-sent event with `payload` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


def typed_event(payload: Struct) -> bytes:
    """One server-sent event with `payload`, a tagged struct, under the name of its tag."""
    name = payload.__struct_config__.tag
    return f"event: {name}\n".encode() + event(payload)


def error_body(error: Exception) -> Error:
    """The envelope of `error`. The details of an unexpected error go to the log only."""
    known = foreseen(error)
    return Error(
        ErrorDetails(
            message=str(known)[:MAX_ERROR_CHARS],
            type=known.type,
            param=known.param and known.param[:MAX_ERROR_CHARS],
            code=known.code,
        )
    )
