"""JSON bodies and server-sent events."""

from __future__ import annotations

import msgspec
from msgspec import Struct

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(payload: Struct) -> bytes:
    """One server-sent event with `payload` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


def typed_event(payload: Struct) -> bytes:
    """One server-sent event with `payload`, a tagged struct, under the name of its tag."""
    name = payload.__struct_config__.tag
    return f"event: {name}\n".encode() + event(payload)
