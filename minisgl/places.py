"""What clients have of a limited number of places: each gets its turn, and its share."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from minisgl.errors import MinisglError
from minisgl.request import Tenant

_Line: TypeAlias = dict[asyncio.Future[None], None]  # of one user, in order of arrival


class Places:
    """Places for work, of which only so much is done at once. While several clients wait for one,
    they take turns, and so do the users of each client. Used by one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places  # above 0 only while nothing waits
        # By client and user; the next turn is that of the first user of the first client.
        self._waiting: OrderedDict[str, OrderedDict[str, _Line]] = OrderedDict()

    @asynccontextmanager
    async def place(self, tenant: Tenant) -> AsyncIterator[None]:
        """A place for the work of a `with` block; raises what `fail` is given."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, tenant: Tenant) -> None:
        """Wait for a place, which must be given back; raises as `place` does."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        users = self._waiting.setdefault(tenant.client, OrderedDict())
        users.setdefault(tenant.user, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            elif turn.exception() is None:  # the turn had come already
                self.give_back()
            raise

    def _leave(self, tenant: Tenant, turn: asyncio.Future[None]) -> None:
        users = self._waiting.get(tenant.client, OrderedDict())
        line = users.get(tenant.user, {})
        line.pop(turn, None)
        if not line:
            users.pop(tenant.user, None)
        if not users:
            self._waiting.pop(tenant.client, None)

    def give_back(self) -> None:
        """Let the next one have a place that was taken."""
        while self._waiting:
            client, users = self._waiting.popitem(last=False)
            user, line = users.popitem(last=False)
            turn = next(iter(line))
            del line[turn]
            if line:
                users[user] = line
            if users:
                self._waiting[client] = users
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def fail(self, reason: MinisglError) -> None:
        """Fail all that wait for a place."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for users in waiting.values():
            for line in users.values():
                for turn in line:
                    if not turn.done():
                        turn.set_exception(reason)


class Shares:
    """How much clients have of something. Once all of it is taken, a client still gets an equal
    part of it (divided among those that have some and this one), so that none locks others out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def take(self, client: str, num: int = 1) -> bool:
        """Take so much more for a client; returns False if it may not have it."""
        share = max(1, self._limit // len(self._taken.keys() | {client}))
        if self.num_taken + num > self._limit and self._taken[client] + num > share:
            return False
        self._taken[client] += num
        return True

    def give_back(self, client: str, num: int = 1) -> None:
        """Give back what was taken."""
        self._taken[client] -= num
        if not self._taken[client]:
            del self._taken[client]
