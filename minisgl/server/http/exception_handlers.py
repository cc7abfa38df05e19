"""How the exceptions of handlers are answered."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from minisgl.errors import MinisglError
from minisgl.server.http.access_log import log_failure
from minisgl.server.http.auth import OPEN_PATHS
from minisgl.server.http.error_responses import error_response
from minisgl.server.http.faults import HTTPError
from minisgl.server.http.messages_paths import status_of
from minisgl.server.http.root_path import route_path


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a MinisglError. Observe answers unexpected exceptions."""
    assert isinstance(error, MinisglError)
    # Do not log probes that ask while the model loads.
    if route_path(request.scope) not in OPEN_PATHS:
        status = status_of(request.scope, error)
        log_failure(request.scope, status, error)
    headers = {"retry-after": "1"} if error.http_status == 429 else None
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
    log_failure(request.scope, error.status_code, fault)
    return error_response(request.scope, fault, error.headers)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected before its body had arrived; the response is not sent."""
    return Response(status_code=499)


HANDLERS = {
    MinisglError: answer_error,
    HTTPException: answer_http_exception,
    ClientDisconnect: answer_disconnect,
}
