"""The paths of the Messages API, whose errors have Anthropic's form from the first byte on."""

from __future__ import annotations

from starlette.types import Scope

from minisgl.errors import foreseen
from minisgl.server.http.root_path import route_path

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
OVERLOADED = 529  # Anthropic's status where others have 503


def is_of_messages(scope: Scope) -> bool:
    """Whether a request is to the Messages API, or to a path below it that does not exist."""
    path = route_path(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def status_of(scope: Scope, error: Exception) -> int:
    """The HTTP status that the client gets for `error`."""
    status = foreseen(error).http_status
    return OVERLOADED if status == 503 and is_of_messages(scope) else status
