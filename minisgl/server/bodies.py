"""How much of all bodies that are still arriving may be in memory at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.requests import Request

from minisgl.errors import CallerError, QueueFullError
from minisgl.server.decoding import Body, decode
from minisgl.server.faults import HTTPError, raise_fault

MAX_BODY_BYTES = 16 << 20
# Numbers, texts, lists and objects in a body: decoding so many holds the loop for some 50 ms.
MAX_VALUES = 1 << 19

MAX_ARRIVING_BYTES = 256 << 20
# A body of this size is free, so that large ones keep no small one out. As much of it waits in the
# connection anyway, and connections have a limit of their own.
SMALL_BODY_BYTES = 64 << 10


class BodiesFullError(QueueFullError):
    """Too much is arriving already."""

    code = "too_many_large_bodies"


class BodyBudget:
    """What the bodies of one server share."""

    def __init__(self, num_bytes: int = MAX_ARRIVING_BYTES) -> None:
        self.num_free = num_bytes

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """A share for one body, given back at the end."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_free += share.num_bytes


class BodyShare:
    """What one body has of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Make room for a body of `num_bytes`; raises BodiesFullError if there is none."""
        if num_bytes <= SMALL_BODY_BYTES or num_bytes <= self.num_bytes:
            return
        more = num_bytes - self.num_bytes
        if more > self._budget.num_free:
            raise BodiesFullError("Too many large requests are arriving at once; try again later.")
        self._budget.num_free -= more
        self.num_bytes = num_bytes


async def read_body(request: Request, kind: type[Body]) -> Body:
    # A web page of any origin may post plain text without asking; JSON it may not.
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
        raise_fault(request.scope)  # then it is cut off
        if _num_values(body) > MAX_VALUES:
            limit = f"The body has more than {MAX_VALUES} numbers, texts, lists and objects."
            raise HTTPError(413, limit, "request_too_large")
        return decode(bytes(body), kind)


def _num_values(body: bytearray) -> int:
    """At most so many are in it: each but the outermost comes after a comma or a bracket.

    Those within a text count too; one with so many of them is longer than sequences are.
    """
    if len(body) <= MAX_VALUES:
        return len(body)
    return 1 + sum(map(body.count, (b",", b"[", b"{")))
