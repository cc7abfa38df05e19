"""Counts HTTP requests, and writes one record of each into the log when it ends.

A record has ids, counts, statuses and times, never prompts, answers or keys. Messages to clients
quote what they sent. They are not logged, and neither is the text of an unexpected error, which may
contain a piece of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import CallerError, ContextLengthError, MinisglError, without_words
from minisgl.server.http.error_bodies import error_response
from minisgl.server.http.paths import is_open, route_path
from minisgl.server.http.request_ids import request_id
from minisgl.server.http.tracing import SPAN

if TYPE_CHECKING:
    from minisgl.server.http.spans import Tracing

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's status for a client that closed the connection
LEFT = "left"  # in the state of a scope: that it did
UNROUTED = "other"  # an unknown path, or refused before routing; the path itself would be free text
BEGAN = "began"  # in the state of a scope: when its request came, by the monotonic clock
FIELDS = "log_fields"  # in the state of a scope: what `note` was given
USAGE = "usage"  # in the state of a scope: where that of its key is counted
FAILURE = "failure"  # in the state of a scope: the level and the reason of `note_failure`

BRACKETS = str.maketrans({"[": ".", "]": None})  # of input[2].content[0]


class Answered(NamedTuple):
    """The labels by which HTTP responses are counted."""

    route: str
    status: int


@dataclass(slots=True)
class Usage:
    """What the requests with a key of one name have used that have ended."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Patterns:
    """The patterns of all paths that the log may show."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = {pattern: compile_path(pattern)[0] for pattern in patterns}

    def match(self, path: str) -> str:
        """The pattern of `path`, also of a request that was refused before routing."""
        if path in self._patterns:
            return path
        matching = (name for name, regex in self._patterns.items() if regex.match(path))
        return next(matching, UNROUTED)


class Observe:
    """Middleware that counts and logs responses, and answers unexpected exceptions with a 500."""

    def __init__(
        self,
        app: ASGIApp,
        responses: Counter[Answered],
        usage: dict[str, Usage] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """usage: counts that of each key that has a name; None: another server counts it. tracing:
        makes a span of each request; None: there are no spans.
        """
        self._app = app
        self._responses = responses
        self._usage = usage
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][BEGAN] = time.monotonic()
        scope["state"][USAGE] = self._usage
        span = None
        if self._tracing is not None:
            span = scope["state"][SPAN] = self._tracing.begin(scope)
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
            note_failure(scope, error)
            if status is None:
                await error_response(scope, error)(scope, receive, observed)
        finally:
            if status is None:
                status = CLIENT_LEFT
                self._responses[Answered(_route(scope), status)] += 1
            write_record(scope, status)
            count_usage(scope)
            if span is not None:
                state = scope["state"]
                span.end(status, state.get(FIELDS, {}), state.get(FAILURE, (0, ""))[1])


def _route(scope: Scope) -> str:
    """The pattern that the path matches; there are few patterns."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return UNROUTED
    routes = (route for route in scope["app"].routes if isinstance(route, Route))
    return next((route.path for route in routes if route.endpoint == endpoint), UNROUTED)


def note(scope: Scope, **fields: str | int | float) -> None:
    """Add fields to the record of a request: nothing that its client chose."""
    scope["state"].setdefault(FIELDS, {}).update(fields)


def with_own_record(scope: Scope) -> Scope:
    """The scope of work that goes on when its request has been answered: with a record of its own,
    which begins with what the request's has."""
    state = scope["state"]
    return {**scope, "state": {**state, FIELDS: dict(state.get(FIELDS, ()))}}


def note_failure(scope: Scope, error: Exception) -> None:
    """Say in the record of a request why it failed, before or during its answer."""
    if isinstance(error, MinisglError):
        level = logging.INFO if error.http_status < 500 else logging.WARNING
        reason = _reason(error, scope["app"].state.field_names)
    else:
        level, reason = logging.ERROR, without_words(error)
    scope["state"][FAILURE] = level, reason


def count_usage(scope: Scope, num_requests: int = 1) -> None:
    """Count what the record of a request has for its key, if that has a name."""
    usage: dict[str, Usage] | None = scope["state"][USAGE]
    noted = scope["state"].get(FIELDS, {})
    name = noted.get("key")
    if usage is not None and isinstance(name, str):  # others are numbers
        of_key = usage.setdefault(name, Usage())
        of_key.num_requests += num_requests
        of_key.num_prompt_tokens += noted.get("prompt_tokens", 0)
        of_key.num_output_tokens += noted.get("output_tokens", 0)


def write_record(scope: Scope, status: int) -> None:
    """Write the record of a request that has ended with `status`, which is 200 for a stream that
    failed after it had begun."""
    state = scope["state"]
    level, reason = state.get(FAILURE, (logging.DEBUG if is_open(scope) else logging.INFO, ""))
    if not logger.isEnabledFor(level):
        return
    if not reason and (status == CLIENT_LEFT or state.get(LEFT)):
        reason = "the client left"
    id, method = request_id(scope), scope["method"]
    route = scope["app"].state.patterns.match(route_path(scope))
    seconds = round(time.monotonic() - state[BEGAN], 4)
    noted = dict(state.get(FIELDS, ()))
    if client := scope.get("client"):  # which a Unix socket does not tell
        noted = {"client": client[0], **noted}
    fields = {"request_id": id, "method": method, "route": route, "status": status, **noted}
    fields["total_s"] = seconds
    if reason:
        fields["reason"] = reason
    said = "".join(f" {name}={value}" for name, value in noted.items())
    said += f": {reason}" if reason else ""
    line = f"request {id}: {method} {route} {status} in {seconds:.3f} s{said}"
    logger.log(level, "%s", line, extra={"fields": fields})


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
