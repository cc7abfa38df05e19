"""Errors of the router itself, in the form of the API that the request was made with."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import EngineStoppedError, foreseen
from minisgl.server.access_log import request_id
from minisgl.server.encoding import DONE, encode, error_body, event
from minisgl.server.root_path import route_path

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
# Anthropic's names of errors, by status.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ReplicaLostError(EngineStoppedError):
    """A replica ended before its answer."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("The replica that answered has ended; send the request again.")


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> ASGIApp:
    """Answer `error` with the envelope of the API that the path belongs to."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        status = foreseen(error).http_status
        content = encode(_body(error, route_path(scope), request_id(scope)))
        answer = Response(content, status, headers, media_type="application/json")
        await answer(scope, receive, send)

    return respond


def last_events(error: Exception, path: str, request_id: str) -> bytes:
    """What ends a stream that has begun to answer a request for `path`."""
    if path.startswith(MESSAGES):
        return _error_event(_body(error, path, request_id))
    if path.startswith(RESPONSES):
        details = error_body(error).error
        failure = {
            "type": "error",
            "code": details.code or details.type,
            "message": details.message,
            "param": details.param,
        }
        return _error_event(failure)
    return event(error_body(error)) + DONE


def _error_event(payload: object) -> bytes:
    return b"event: error\ndata: " + encode(payload) + b"\n\n"


def _body(error: Exception, path: str, request_id: str) -> object:
    body = error_body(error)
    if not path.startswith(MESSAGES):
        return body
    type = ANTHROPIC_TYPES.get(foreseen(error).http_status)
    details = {"type": type or "api_error", "message": body.error.message}
    return {"type": "error", "error": details, "request_id": request_id}
