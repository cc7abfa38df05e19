"""Errors as HTTP responses, in OpenAI's envelope."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import MinisglError, foreseen
from minisgl.server.access_log import log_failure, request_id
from minisgl.server.auth import OPEN_PATHS
from minisgl.server.encoding import encode, error_body
from minisgl.server.faults import HTTPError
from minisgl.server.root_path import route_path


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error_body(error), foreseen(error).http_status, headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a MinisglError. Observe answers unexpected exceptions."""
    assert isinstance(error, MinisglError)
    # Do not log probes that ask while the model loads.
    if route_path(request.scope) not in OPEN_PATHS:
        log_failure(request_id(request.scope), error.http_status, error)
    return error_response(error, {"retry-after": "1"} if error.http_status == 429 else None)


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
    log_failure(request_id(request.scope), error.status_code, fault)
    return error_response(fault, error.headers)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected before its body had arrived; the response is not sent."""
    return Response(status_code=499)
