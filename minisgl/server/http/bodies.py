"""Reads the bodies of requests, within limits of size for each and for all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from minisgl.errors import CallerError, QueueFullError
from minisgl.server.http.content_encoding import decoder_for
from minisgl.server.http.decoding import Body, decode
from minisgl.server.http.faults import HTTPError, raise_fault

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
    """The memory that the arriving bodies of one server share.

    What has arrived counts, not what was announced. If it becomes too much, the slowest body is
    refused, so that slow ones cannot keep others out.
    """

    def __init__(
        self, num_bytes: int = MAX_ARRIVING_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_free = num_bytes
        self._clock = clock
        self._shares: set[BodyShare] = set()  # of the bodies that are counted

    @contextlib.asynccontextmanager
    async def share(self) -> AsyncIterator[BodyShare]:
        """A share of the budget for one body, released at the end; raises BodiesFullError."""
        try:
            async with asyncio.timeout(None) as limit:
                share = BodyShare(self, limit, self._clock())
                try:
                    yield share
                finally:
                    self._release(share)
        except TimeoutError:
            raise BodiesFullError(
                "Too many large requests are arriving at once, and this one is the slowest; "
                "try again later."
            ) from None

    def grow(self, share: BodyShare, num_bytes: int) -> None:
        self._shares.add(share)
        self.num_free -= num_bytes - share.num_bytes
        share.num_bytes = num_bytes
        now = self._clock()
        while self.num_free < 0:
            slowest = min(self._shares, key=lambda one: one.num_bytes / max(now - one.began, 1e-9))
            self._release(slowest)
            slowest.end()

    def _release(self, share: BodyShare) -> None:
        self._shares.discard(share)
        self.num_free += share.num_bytes
        share.num_bytes = 0


class BodyShare:
    """The part of the budget that one body occupies."""

    def __init__(self, budget: BodyBudget, limit: asyncio.Timeout, began: float) -> None:
        self._budget = budget
        self._limit = limit
        self._is_ended = False
        self.began = began
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Count a body of which `num_bytes` have arrived."""
        if num_bytes > SMALL_BODY_BYTES and not self._is_ended:
            self._budget.grow(self, num_bytes)

    def end(self) -> None:
        """Interrupt whoever reads this body."""
        self._is_ended = True
        self._limit.reschedule(0)


async def read_body(request: Request, kind: type[Body], *, strict: bool = False) -> Body:
    """Read the body of `request` as a `kind`; raises CallerError or BodiesFullError.

    strict: unknown fields are errors.
    """
    # Browsers let any web page post plain text without a preflight, but not JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        reason = "The header Content-Type must be application/json"
        raise CallerError(f"{reason}.", logged=reason)
    async with _arriving(request) as body:
        if _num_values(body) > MAX_VALUES:
            limit = f"The body has more than {MAX_VALUES} numbers, texts, lists and objects."
            raise HTTPError(413, limit, "request_too_large")
        return decode(bytes(body), kind, strict=strict)


async def read_bytes(request: Request) -> bytes:
    """Read the body of `request`, whatever it is; raises HTTPError or BodiesFullError."""
    async with _arriving(request) as body:
        return bytes(body)


@contextlib.asynccontextmanager
async def _arriving(request: Request) -> AsyncIterator[bytearray]:
    """The body of `request` when it has arrived and is decoded, counted in the budget until the
    context ends."""
    limit = f"The body has more than {MAX_BODY_BYTES >> 20} MiB."
    too_large = HTTPError(413, limit, "request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    decoder = decoder_for(",".join(request.headers.getlist("content-encoding")))
    bodies: BodyBudget = request.app.state.bodies
    async with bodies.share() as share:
        body = bytearray()
        async for part in request.stream():
            for piece in decoder.pieces(part) if decoder else (part,):
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                share.grow_to(len(body))
                if decoder:
                    await asyncio.sleep(0)  # a small part may become many pieces
        raise_fault(request.scope)  # a fault truncates the body
        if decoder:
            decoder.end()
        yield body


def _num_values(body: bytearray) -> int:
    """An upper bound: every value except the outermost follows a comma or an opening bracket.

    Commas inside texts count as well; a text with that many is too long for any sequence.
    """
    if len(body) <= MAX_VALUES:
        return len(body)
    return 1 + sum(map(body.count, (b",", b"[", b"{")))
