"""How much of all bodies that are still arriving may be in memory at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from minisgl.errors import QueueFullError

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
    def share(self) -> Iterator[Share]:
        """A share for one body, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.num_free += share.num_bytes


class Share:
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
