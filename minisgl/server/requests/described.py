"""What is said of the fields of requests, in the OpenAPI description and in errors."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

NOT_GIVEN: Any = None  # the default of a Raw, which is null where null was sent


def unsupported(instead: str) -> Meta:
    """Of a field that takes null: any other value gets a 400 that says what to do instead."""
    return Meta(description=f"Not supported: {instead}.", extra={"instead": instead})


Unsupported = Annotated[None, unsupported("leave it out")]
# A value that is not decoded: a client could send many numbers that take long to read.
Ignored = Annotated[Raw, Meta(description="Accepted, and without effect.")]
