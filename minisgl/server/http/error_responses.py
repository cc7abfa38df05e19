"""Errors as HTTP responses, in OpenAI's envelope or, on the paths of its API, in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from minisgl.server.http.encoding import encode
from minisgl.server.http.error_bodies import error_body, messages_error_body
from minisgl.server.http.messages_paths import is_of_messages, status_of
from minisgl.server.http.request_ids import request_id


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def error_response(
    scope: Scope, error: Exception, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that has failed, in the envelope that belongs to its path."""
    body: Struct = error_body(error)
    if is_of_messages(scope):
        body = messages_error_body(error, request_id(scope))
    return json_response(body, status_of(scope, error), headers)
