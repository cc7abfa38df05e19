"""Errors as HTTP responses, in OpenAI's envelope or, on the paths of its API, in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from minisgl.errors import MinisglError
from minisgl.server.access_log import log_failure, request_id
from minisgl.server.auth import OPEN_PATHS
from minisgl.server.encoding import encode, error_body
from minisgl.server.faults import HTTPError
from minisgl.server.messages_api import errors, paths
from minisgl.server.root_path import route_path


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def error_response(
    scope: Scope, error: Exception, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that has failed, in the envelope that belongs to its path."""
    body: Struct = error_body(error)
    if paths.is_of_messages(scope):
        body = errors.error_body(error, request_id(scope))
    return json_response(body, paths.status_of(scope, error), headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a MinisglError. Observe answers unexpected exceptions."""
    assert isinstance(error, MinisglError)
    # Do not log probes that ask while the model loads.
    if route_path(request.scope) not in OPEN_PATHS:
        status = paths.status_of(request.scope, error)
        log_failure(request_id(request.scope), status, error)
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
    log_failure(request_id(request.scope), error.status_code, fault)
    return error_response(request.scope, fault, error.headers)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected before its body had arrived; the response is not sent."""
    return Response(status_code=499)
