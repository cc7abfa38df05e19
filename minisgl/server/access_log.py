"""Counts and logs HTTP requests: ids, statuses and times, never prompts or answers.

Messages to clients quote what they sent. They are not logged, and neither is the text of an
unexpected error, which may contain a piece of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from msgspec import Struct
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import CallerError, ContextLengthError, MinisglError, without_words
from minisgl.server import constraints, messages, protocol, tools
from minisgl.server.messages_api import protocol as messages_protocol
from minisgl.server.messages_api.paths import status_of
from minisgl.server.metrics import Answered
from minisgl.server.responses_api import protocol as responses_protocol

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's status for a client that closed the connection
LEFT = "left"  # in the state of a scope: that it did
UNROUTED = "other"  # an unknown path, or refused before routing; the path itself would be free text

# Parameter names that may be logged: the name of an unknown field could contain anything.
FIELD_NAMES = frozenset(
    name
    for module in (protocol, messages, tools, constraints, messages_protocol, responses_protocol)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Struct)
    for name in kind.__struct_fields__
)
BRACKETS = str.maketrans({"[": ".", "]": None})  # of input[2].content[0]


class Observe:
    """Middleware that counts responses, and answers unexpected exceptions with a 500."""

    def __init__(
        self,
        app: ASGIApp,
        responses: Counter[Answered],
        error_response: Callable[[Scope, Exception], ASGIApp],
    ) -> None:
        self._app = app
        self._responses = responses
        self._error_response = error_response

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
            log_failure(request_id(scope), status_of(scope, error), error)
            if status is None:
                await self._error_response(scope, error)(scope, receive, observed)
        finally:
            if status is None:
                status = CLIENT_LEFT
                self._responses[Answered(_route(scope), status)] += 1
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "request %s: %s %s %d in %.3f s",
                    *(request_id(scope), scope["method"], _route(scope), status),
                    time.monotonic() - began,
                )


def _route(scope: Scope) -> str:
    """The pattern that the path matches; there are few patterns."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return UNROUTED
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    return next((route.path for route in routes if route.endpoint == endpoint), UNROUTED)


def request_id(scope: Scope) -> str:
    """The id of the request in the log, set by RequestIds."""
    known: str = scope["state"]["request_id"]
    return known


def log_failure(request_id: str, status: int, error: Exception) -> None:
    """Log one line about a request that failed, before or during its answer.

    `status` is the status that the client got: 200 if the answer had begun.
    """
    if not isinstance(error, MinisglError):
        logger.error("request %s: %d %s", request_id, status, without_words(error))
        return
    level = logging.INFO if error.http_status < 500 else logging.WARNING
    logger.log(level, "request %s: %d %s", request_id, status, _reason(error))


def _reason(error: MinisglError) -> str:
    """The reason without anything that the client sent."""
    if not isinstance(error, CallerError) or isinstance(error, ContextLengthError):
        return str(error)
    reason = error.code or type(error).__name__
    path = error.param.translate(BRACKETS).split(".") if error.param else []
    if path and all(name in FIELD_NAMES or name.isdigit() for name in path):
        reason += f" ({error.param})"
    return reason
