"""Ends requests that take too long, or wait too long for their first step.

A request says by the header x-request-timeout, or by the field timeout of its body, how many
seconds it may take; they count from its arrival. How long a request may wait for its first step is
an option of the server. Both are timers of the event loop, which cancel what waits; whoever is
cancelled aborts what it has asked of the engine, as when the client leaves. A request without a
limit has no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.errors import DeadlineError, InvalidRequestError, MinisglError
from minisgl.request import Request
from minisgl.server.http.access_log import BEGAN

HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 604_800  # a week
Seconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
KEY = "time_limit"  # in the state of a scope


class QueueTimeError(MinisglError):
    """A request has waited for its first step as long as it may."""

    http_status = 503
    type = "service_unavailable"
    code = "queue_timeout"
    headers: ClassVar[Mapping[str, str]] = {"retry-after": "1"}

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The request has waited {seconds:g} seconds for its turn, the most that "
            "--max-queue-seconds allows; try again later."
        )


class TimeLimit:
    """How long a request may take, and wait. Used on the event loop."""

    def __init__(self, scope: Scope, max_queue_s: float | None = None) -> None:
        """max_queue_s: how long it may wait for its first step; None: any time.

        Raises InvalidRequestError for a header that is no number of seconds.
        """
        scope["state"][KEY] = self
        self._began: float = scope["state"][BEGAN]
        self._max_queue_s = max_queue_s
        self._ends = math.inf  # by the monotonic clock
        self._timeout = asyncio.timeout(None)  # of what is held now
        self._watching: asyncio.TimerHandle | None = None
        self._error: MinisglError = DeadlineError()
        if (given := Headers(scope=scope).get(HEADER)) is not None:
            self.shorten(_seconds(given))

    @property
    def is_set(self) -> bool:
        return self._ends < math.inf or self._max_queue_s is not None

    @property
    def seconds_left(self) -> float | None:
        """None: any number. Less than 0 of a request that is late."""
        return self._ends - time.monotonic() if self._ends < math.inf else None

    def shorten(self, seconds: float | None) -> None:
        """Let the request take no more than this, from its arrival; None: as long as before."""
        if seconds is not None:
            self._ends = min(self._ends, self._began + seconds)

    @contextlib.asynccontextmanager
    async def held(self, grace_s: float = 0.0) -> AsyncIterator[None]:
        """Cancel what runs inside when it is late, and raise DeadlineError or QueueTimeError.

        grace_s: how much later than at the deadline.
        """
        left = self.seconds_left
        try:
            async with asyncio.timeout(None if left is None else left + grace_s) as self._timeout:
                yield
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise self._error from None
        finally:
            if self._watching is not None:
                self._watching.cancel()

    def watch(self, request: Request) -> None:
        """Limit how long `request` waits, which has just been submitted. Called while held."""
        if self._max_queue_s is not None:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(self._max_queue_s, self._look, request)

    def _look(self, request: Request) -> None:
        if request.admitted_s is None:
            assert self._max_queue_s is not None
            self._error = QueueTimeError(self._max_queue_s)
            self._timeout.reschedule(0)


def limit_of(scope: Scope) -> TimeLimit:
    """The limit that the route of a request has made."""
    limit: TimeLimit = scope["state"][KEY]
    return limit


class _Timeout(Struct):
    timeout: Seconds | None = None


_decode = msgspec.json.Decoder(_Timeout).decode


def timeout_of(body: bytes) -> float | None:
    """The timeout in a body that is passed on; None for one that is not valid, which the engine
    refuses. O(body)."""
    if b'"timeout"' not in body:
        return None
    try:
        return _decode(body).timeout
    except (ValueError, RecursionError):
        return None


def _seconds(given: str) -> float:
    try:
        seconds = math.nan if "_" in given else float(given)  # to Python, 1_000 is a number
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequestError(HEADER, f"allowed: more than 0 seconds, up to {MAX_TIMEOUT_S}.")
    return seconds
