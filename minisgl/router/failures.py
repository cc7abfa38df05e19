"""The end of a stream whose replica has ended, in the form of the API of its path."""

from __future__ import annotations

import re

from msgspec import Struct
from starlette.types import Scope

from minisgl.errors import EngineStoppedError
from minisgl.router.route_keys import RESPONSES
from minisgl.server.http.encoding import DONE, event, typed_event
from minisgl.server.http.error_bodies import error_body, messages_error_body
from minisgl.server.http.messages_paths import is_of_messages
from minisgl.server.http.request_ids import request_id
from minisgl.server.http.root_path import route_path

# At the end of an event of that API, where a string in JSON cannot stand; with its chunk's end.
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)}\s*$')
MAX_NUMBER_BYTES = 64  # of such an end


class ReplicaLostError(EngineStoppedError):
    """A replica ended before its answer."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("The replica that answered has ended; send the request again.")


class ResponseError(Struct, tag_field="type", tag="error"):
    """The error event of the Responses API."""

    code: str | None
    message: str
    param: str | None
    sequence_number: int


def last_events(scope: Scope, error: Exception, sent: bytes) -> bytes:
    """What ends a stream that has begun to answer a request.

    sent: what the client got before, or the end of it, to the end of an event.
    """
    if is_of_messages(scope):
        return typed_event(messages_error_body(error, request_id(scope)))
    body = error_body(error)
    if route_path(scope) == RESPONSES:
        details = body.error
        number = _next_number(sent)
        return typed_event(ResponseError(details.code, details.message, details.param, number))
    return event(body) + DONE


def _next_number(sent: bytes) -> int:
    """What follows the number of the last event in `sent`."""
    found = SEQUENCE_NUMBER.search(sent[-MAX_NUMBER_BYTES:])
    return int(found[1]) + 1 if found else 0
