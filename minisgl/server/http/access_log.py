"""Counts and logs HTTP requests: ids, statuses and times, never prompts or answers.

Messages to clients quote what they sent. They are not logged, and neither is the text of an
unexpected error, which may contain a piece of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Set
from typing import NamedTuple

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import CallerError, ContextLengthError, MinisglError, without_words
from minisgl.server.http.error_bodies import error_response
from minisgl.server.http.paths import status_of
from minisgl.server.http.request_ids import request_id

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's status for a client that closed the connection
LEFT = "left"  # in the state of a scope: that it did
UNROUTED = "other"  # an unknown path, or refused before routing; the path itself would be free text

BRACKETS = str.maketrans({"[": ".", "]": None})  # of input[2].content[0]


class Answered(NamedTuple):
    """The labels by which HTTP responses are counted."""

    route: str
    status: int


class Observe:
    """Middleware that counts responses, and answers unexpected exceptions with a 500."""

    def __init__(self, app: ASGIApp, responses: Counter[Answered]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status: int | None = None

        # Called for each event of a stream, so not a coroutine of its own.
        def observed(message: Message) -> Awaitable[None]:
            if status is None and message["type"] == "http.response.start":
                return start(message)
            return send(message)

        async def start(message: Message) -> None:
            nonlocal status
            status = message["status"]
            await send(message)
            if scope["state"].get(LEFT):  # while this waited for the client to read
                status = CLIENT_LEFT
            self._responses[Answered(_route(scope), status)] += 1

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            log_failure(scope, status_of(scope, error), error)
            if status is None:
                await error_response(scope, error)(scope, receive, observed)
        finally:
            if status is None:
                status = CLIENT_LEFT
                self._responses[Answered(_route(scope), status)] += 1
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "request %s: %s %s %d in %.3f s",
                    request_id(scope),
                    scope["method"],
                    _route(scope),
                    status,
                    time.monotonic() - began,
                )


def _route(scope: Scope) -> str:
    """The pattern that the path matches; there are few patterns."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return UNROUTED
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    return next((route.path for route in routes if route.endpoint == endpoint), UNROUTED)


def log_failure(scope: Scope, status: int, error: Exception) -> None:
    """Log one line about a request that failed, before or during its answer.

    `status` is the status that the client got: 200 if the answer had begun.
    """
    id = request_id(scope)
    if not isinstance(error, MinisglError):
        logger.error("request %s: %d %s", id, status, without_words(error))
        return
    level = logging.INFO if error.http_status < 500 else logging.WARNING
    reason = _reason(error, scope["app"].state.field_names)
    logger.log(level, "request %s: %d %s", id, status, reason)


def _reason(error: MinisglError, field_names: Set[str]) -> str:
    """The reason without anything that the client sent.

    field_names: those that may be logged. The name of an unknown field could contain anything.
    """
    if not isinstance(error, CallerError) or isinstance(error, ContextLengthError):
        return str(error)
    reason = error.code or error.logged
    if not error.param:
        return reason
    path = error.param.translate(BRACKETS).split(".")
    is_known = all(name in field_names or name.isdigit() for name in path)
    return f"{error.param if is_known else 'a field'}: {reason}"
