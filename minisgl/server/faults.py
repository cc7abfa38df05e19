"""Faults of the HTTP request, rather than of a field in its body, and how they are answered.

A connection with malformed input gets an answer, too. The connection puts the fault into the state
of a scope that the app answers like any other, so that the answer has an id, a line in the log and
is counted in the metrics.
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
    """Raise the fault that the connection has found in the request so far, if any."""
    fault: HTTPError | None = scope.get("state", {}).get(KEY)
    if fault is not None:
        raise fault


class AnswerFaults:
    """Middleware that answers requests whose head is faulty."""

    def __init__(self, app: ASGIApp, error_response: Callable[[Scope, Exception], ASGIApp]) -> None:
        self._app = app
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        try:
            raise_fault(scope)
        except HTTPError as fault:
            log_failure(request_id(scope), fault.http_status, fault)
            app = self._error_response(scope, fault)
        await app(scope, receive, send)
