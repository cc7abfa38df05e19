"""The record of an endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp

from minisgl.server.http.error_bodies import Error
from minisgl.server.service import Service

READING = (400, 404, 408, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a method does at a path. Its route, description and checks are made from this."""

    path: str  # as routes have it
    summary: str
    # Given an Asked with the body; the request itself if there is none.
    handler: Callable[[Service, Any], Awaitable[ASGIApp]]
    body: type[Struct] | None = None
    answer: type[Struct] | None = None  # None for what is not JSON
    event: Any = None  # the type of the events, if it can stream
    _: KW_ONLY
    method: str = "POST"
    example: Mapping[str, Any] = field(default_factory=dict)  # a body to begin with
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # schemas by parameter
    naming: Callable[[], AbstractContextManager[None]] = nullcontext  # of fields in errors
    error: type[Struct] = Error
    errors: tuple[int, ...] = READING
    task: str = ""  # that a model must be loaded for (--task); empty: any
    # Whether it is for probes, which have no key, and whose failures are not logged.
    is_open: bool = False
    is_for_admin: bool = False  # it needs the admin key, whatever others need

    @property
    def shown_path(self) -> str:
        """The path without the kinds of its parameters."""
        return self.path.replace(":path}", "}")
