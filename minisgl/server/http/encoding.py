"""JSON bodies and server-sent events."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def event(payload: Struct) -> bytes:
    """One server-sent event with `payload` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


def typed_event(payload: Struct) -> bytes:
    """One server-sent event with `payload`, a tagged struct, under the name of its tag."""
    name = payload.__struct_config__.tag
    return f"event: {name}\n".encode() + event(payload)
