"""Faults of HTTP itself, rather than of a field in a request, and how they get their answers.

A connection that sends what is no request gets an answer all the same. The connection puts the
fault into the state of a scope that the app answers like any other, so that the answer has an id,
a line in the log and a place in the metrics.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CallerError
from minisgl.server.access_log import log_failure, request_id

KEY = "fault"  # in the state of a scope


class HTTPError(CallerError):
    """A fault of the HTTP request, rather than of a field in it."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code


def raise_fault(scope: Scope) -> None:
    """Raise what the connection found wrong with the request so far, if anything."""
    fault: HTTPError | None = scope.get("state", {}).get(KEY)
    if fault is not None:
        raise fault


class AnswerFaults:
    """Middleware that answers requests whose head is wrong already."""

    def __init__(self, app: ASGIApp, error_response: Callable[[Exception], ASGIApp]) -> None:
        self._app = app
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        try:
            raise_fault(scope)
        except HTTPError as fault:
            log_failure(request_id(scope), fault.http_status, fault)
            app = self._error_response(fault)
        await app(scope, receive, send)
