"""Reads the bodies of requests, within limits of size for each and for all of them together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.requests import Request

from minisgl.errors import CallerError, QueueFullError
from minisgl.server.decoding import Body, decode
from minisgl.server.faults import HTTPError, raise_fault

MAX_BODY_BYTES = 16 << 20
# Numbers, texts, lists and objects in a body: decoding that many blocks the loop for some 50 ms.
MAX_VALUES = 1 << 19

MAX_ARRIVING_BYTES = 256 << 20
# A body up to this size is not counted, so that large bodies do not keep small ones out. The
# connection buffers that much anyway, and the number of connections is limited.
SMALL_BODY_BYTES = 64 << 10


class BodiesFullError(QueueFullError):
    """Too many large bodies are arriving already."""

    code = "too_many_large_bodies"


class BodyBudget:
    """The memory that the arriving bodies of one server share."""

    def __init__(self, num_bytes: int = MAX_ARRIVING_BYTES) -> None:
        self.num_free = num_bytes

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """A share of the budget for one body, released at the end."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_free += share.num_bytes


class BodyShare:
    """The part of the budget that one body occupies."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Reserve room for a body of `num_bytes` in total; raises BodiesFullError."""
        if num_bytes <= SMALL_BODY_BYTES or num_bytes <= self.num_bytes:
            return
        more = num_bytes - self.num_bytes
        if more > self._budget.num_free:
            raise BodiesFullError("Too many large requests are arriving at once; try again later.")
        self._budget.num_free -= more
        self.num_bytes = num_bytes


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read the body of `request` as a `kind`; raises CallerError or BodiesFullError."""
    # Browsers let any web page post plain text without a preflight, but not JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise CallerError("The header Content-Type must be application/json.")
    limit = f"The body has more than {MAX_BODY_BYTES >> 20} MiB."
    too_large = HTTPError(413, limit, "request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    bodies: BodyBudget = request.app.state.bodies
    with bodies.share() as share:
        share.grow_to(int(announced) if announced.isdecimal() else 0)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise too_large
            share.grow_to(len(body))
        raise_fault(request.scope)  # a fault truncates the body
        if _num_values(body) > MAX_VALUES:
            limit = f"The body has more than {MAX_VALUES} numbers, texts, lists and objects."
            raise HTTPError(413, limit, "request_too_large")
        return decode(bytes(body), kind)


def _num_values(body: bytearray) -> int:
    """An upper bound: every value except the outermost follows a comma or an opening bracket.

    Commas inside texts count as well; a text with that many is too long for any sequence.
    """
    if len(body) <= MAX_VALUES:
        return len(body)
    return 1 + sum(map(body.count, (b",", b"[", b"{")))
