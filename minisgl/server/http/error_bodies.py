"""Errors in OpenAI's envelope or, on the paths of its API, in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Scope

from minisgl.errors import ContextLengthError, TextTooLongError, ThreadError, foreseen
from minisgl.server.http.encoding import json_response
from minisgl.server.http.paths import is_of_messages, status_of
from minisgl.server.http.request_ids import request_id as id_of

MAX_ERROR_CHARS = 1000  # a message may quote what the caller sent

ErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "timeout_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
# By the status that the error has elsewhere. What is not here is the fault of the request.
TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None  # the dotted path of the field that is wrong
    code: str | None


class Error(Struct):
    """The body of every error, and the event that ends a failed stream."""

    error: ErrorDetails


class Rejection(Struct):
    error_code: str


class MessagesErrorDetails(Struct):
    type: ErrorType
    message: str
    details: Rejection | UnsetType = UNSET


class MessagesError(Struct, tag_field="type", tag="error"):
    """The body of every error of the Messages API, and the event that ends a failed stream."""

    error: MessagesErrorDetails
    request_id: str


def error_body(error: Exception) -> Error:
    """The envelope of `error`. The details of an unexpected error go to the log only."""
    known = foreseen(error)
    return Error(
        ErrorDetails(
            message=str(known)[:MAX_ERROR_CHARS],
            type=known.type,
            param=known.param and known.param[:MAX_ERROR_CHARS],
            code=known.code,
        )
    )


def messages_error_body(error: Exception, request_id: str) -> MessagesError:
    """The envelope of `error`. The details of an unexpected error go to the log only."""
    known = foreseen(error)
    message = str(known)
    if isinstance(known, ContextLengthError):
        # In the words by which Anthropic's clients know when to shorten a conversation.
        num_tokens, most = known.num_prompt_tokens, known.max_seq_len - 1
        message = f"prompt is too long: {num_tokens} tokens > {most} maximum"
    elif isinstance(known, TextTooLongError):
        message = f"prompt is too long: {message}"
    return MessagesError(
        error=MessagesErrorDetails(
            type=TYPES.get(known.http_status, "invalid_request_error"),
            message=message[:MAX_ERROR_CHARS],
            details=Rejection(known.code) if isinstance(known, ThreadError) else UNSET,
        ),
        request_id=request_id,
    )


def error_response(
    scope: Scope, error: Exception, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that has failed, in the envelope that belongs to its path."""
    body: Struct = error_body(error)
    if is_of_messages(scope):
        body = messages_error_body(error, id_of(scope))
    return json_response(body, status_of(scope, error), headers)
