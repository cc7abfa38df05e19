"""What is counted and logged of HTTP requests: ids, statuses and times, never what was said.

Messages to clients quote what they sent. They do not go to the log, and neither does the text of
an unforeseen error, which may hold a piece of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import CallerError, ContextLengthError, MinisglError, foreseen, without_words
from minisgl.server import messages, protocol
from minisgl.server.metrics import Answered, Metrics

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's number for a request that nobody waits for any more
UNROUTED = (
    "other"  # no such path, or refused before the routes; a path of its own would be free text
)

# What a parameter may be called in the log: a client can put anything into an unknown field's name.
FIELD_NAMES = frozenset(
    name
    for kind in (*vars(protocol).values(), *vars(messages).values())
    if isinstance(kind, type) and issubclass(kind, Struct)
    for name in kind.__struct_fields__
)


class Observe:
    """Middleware that counts responses, and turns what nobody foresaw into one."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, error_response: Callable[[Exception], ASGIApp]
    ) -> None:
        self._app = app
        self._responses = metrics.responses
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status: int | None = None

        # Called for each event of a stream, so not a coroutine of its own.
        def observed(message: Message) -> Awaitable[None]:
            nonlocal status
            if status is None and message["type"] == "http.response.start":
                status = message["status"]
                self._responses[Answered(_route(scope), status)] += 1
            return send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            log_failure(request_id(scope), foreseen(error).http_status, error)
            if status is None:
                await self._error_response(error)(scope, receive, observed)
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
    """The pattern of the path, of which there are few."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return UNROUTED
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    return next((route.path for route in routes if route.endpoint == endpoint), UNROUTED)


def request_id(scope: Scope) -> str:
    """What the request is called in the log; RequestIds has made it."""
    known: str = scope["state"]["request_id"]
    return known


def log_failure(request_id: str, status: int, error: Exception) -> None:
    """One line on a request that got an error instead of an answer, or at the end of one.

    `status` is what the client got, 200 where the answer had begun.
    """
    if not isinstance(error, MinisglError):
        logger.error("request %s: %d %s", request_id, status, without_words(error))
        return
    level = logging.INFO if error.http_status < 500 else logging.WARNING
    logger.log(level, "request %s: %d %s", request_id, status, _reason(error))


def _reason(error: MinisglError) -> str:
    """In our words alone."""
    if not isinstance(error, CallerError) or isinstance(error, ContextLengthError):
        return str(error)
    reason = error.code or type(error).__name__
    path = error.param.split(".") if error.param else []
    if path and all(name in FIELD_NAMES or name.isdigit() for name in path):
        reason += f" ({error.param})"
    return reason
