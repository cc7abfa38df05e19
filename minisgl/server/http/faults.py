"""Faults of the HTTP request, rather than of a field in its body, and how they are answered.

A connection with malformed input gets an answer, too. The connection puts the fault into the state
of a scope that the app answers like any other, so that the answer has an id, a line in the log and
is counted in the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CallerError
from minisgl.server.http.access_log import log_failure
from minisgl.server.http.error_responses import error_response

KEY = "fault"  # in the state of a scope


class HTTPError(CallerError):
    """A fault of the HTTP request, rather than of a field in it."""

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """headers: of the answer, besides the usual ones."""
        super().__init__(message)
        self.http_status = status
        self.code = code
        self.headers = headers


def raise_fault(scope: Scope) -> None:
    """Raise the fault that the connection has found in the request so far, if any."""
    fault: HTTPError | None = scope.get("state", {}).get(KEY)
    if fault is not None:
        raise fault


class Checks:
    """Middleware that answers the requests that one of `checks` refuses, by raising HTTPError."""

    def __init__(self, app: ASGIApp, checks: Sequence[Callable[[Scope], None]]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        try:
            for check in self._checks:
                check(scope)
        except HTTPError as fault:
            log_failure(scope, fault.http_status, fault)
            app = error_response(scope, fault, fault.headers)
        await app(scope, receive, send)
