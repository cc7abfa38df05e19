"""Faults of the HTTP request, rather than of a field in its body, and how they are answered.

A connection with malformed input gets an answer, too. The connection puts the fault into the state
of a scope that the app answers like any other, so that the answer has an id, a line in the log and
is counted in the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CallerError, MinisglError
from minisgl.server.http.access_log import note_failure
from minisgl.server.http.error_bodies import error_response
from minisgl.server.http.paths import is_open

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


def checked(app: ASGIApp, checks: Sequence[Callable[[Scope], None]]) -> ASGIApp:
    """Middleware that answers the requests that one of `checks` refuses, by raising HTTPError."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        try:
            for check in checks:
                check(scope)
        except HTTPError as fault:
            note_failure(scope, fault)
            answering = error_response(scope, fault, fault.headers)
        await answering(scope, receive, send)

    return answer


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a MinisglError. Observe answers unexpected exceptions."""
    assert isinstance(error, MinisglError)
    # Probes that ask while the model loads have not failed.
    if not is_open(request.scope):
        note_failure(request.scope, error)
    headers = getattr(error, "headers", None)
    if error.http_status == 429:
        headers = {"retry-after": "1"}
    return error_response(request.scope, error, headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer an error of Starlette itself: an unknown path or a method that is not allowed."""
    assert isinstance(error, HTTPException)
    here = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        fault = HTTPError(404, f"There is nothing at {here}.", "unknown_url")
    elif error.status_code == 405:
        fault = HTTPError(405, f"{here} is not allowed.", "method_not_allowed")
    else:
        fault = HTTPError(error.status_code, error.detail, "http_error")
    note_failure(request.scope, fault)
    return error_response(request.scope, fault, error.headers)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected before its body had arrived; the response is not sent."""
    return Response(status_code=499)


HANDLERS = {
    MinisglError: answer_error,
    HTTPException: answer_http_exception,
    ClientDisconnect: answer_disconnect,
}
