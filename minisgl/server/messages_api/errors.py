"""Errors in Anthropic's envelope."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.errors import ContextLengthError, TextTooLongError, foreseen
from minisgl.server.encoding import MAX_ERROR_CHARS
from minisgl.server.messages_api.schemas import ErrorType, MessagesError, MessagesErrorDetails

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
}


def error_body(error: Exception, request_id: str) -> MessagesError:
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
        ),
        request_id=request_id,
    )
