"""The waiting requests, in the order in which they may be admitted.

Clients take turns, one admitted request per turn, and so do the users of each client; the policy
orders the requests of one user. A step visits only the clients and users whose turn it is: no
operation here is linear in the number of waiting requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import TypeAlias

from minisgl.scheduler.state import Waiting

# Orders requests, given in order of arrival, for admission; the integer bounds how many are
# compared.
Policy: TypeAlias = Callable[[Iterable[Waiting], int], Iterable[Waiting]]


class Line:
    """The waiting requests of one user, ordered by the policy alone."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, waiting: Waiting) -> None:
        if self._waiting and self._waiting[-1].arrival > waiting.arrival:
            insort(self._waiting, waiting, key=_arrival)
        else:
            self._waiting.append(waiting)

    def remove(self, waiting: Waiting) -> None:
        if self._waiting[0] is waiting:
            self._waiting.popleft()
        else:
            del self._waiting[bisect_left(self._waiting, waiting.arrival, key=_arrival)]

    def admitted(self, requests: Sequence[Waiting], postponed: Sequence[Waiting] = ()) -> None:
        """Remove the admitted requests, and count how often each of the others was passed over,
        put off or not."""
        for waiting in requests:
            self.remove(waiting)
        last = max(map(_arrival, requests))
        for waiting in takewhile(lambda other: other.arrival < last, self._waiting):
            waiting.num_overtaken += 1

    def in_order(self, policy: Policy, window: int) -> Iterator[Waiting]:
        yield from policy(self._waiting, window)

    def check(self) -> list[Waiting]:
        """Every request, in order of arrival; AssertionError if they are out of order."""
        arrivals = [waiting.arrival for waiting in self._waiting]
        assert arrivals and arrivals == sorted(arrivals), "a line is empty or out of order"
        return list(self._waiting)


class Turns:
    """Waiting requests in parts that take turns. A part is a Line or consists of parts itself."""

    def __init__(self, name_of: Callable[[Waiting], str], make: Callable[[], Turns | Line]) -> None:
        self._name_of = name_of
        self._make = make
        self._parts: OrderedDict[str, Turns | Line] = OrderedDict()  # next turn first
        self._last: str | None = None  # the part that had the last turn
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_of(self, name: str) -> int:
        part = self._parts.get(name)
        return 0 if part is None else len(part)

    def put(self, waiting: Waiting) -> None:
        name = self._name_of(waiting)
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self._make()
            if self._last is not None and self._last in self._parts:
                self._parts.move_to_end(self._last)  # it has had its turn, the new part has not
        part.put(waiting)
        self._num_waiting += 1

    def remove(self, waiting: Waiting) -> None:
        name = self._name_of(waiting)
        part = self._parts[name]
        part.remove(waiting)
        self._num_waiting -= 1
        if not len(part):
            del self._parts[name]

    def admitted(self, requests: Sequence[Waiting], postponed: Sequence[Waiting] = ()) -> None:
        """Remove the admitted requests, given in the order of `in_order`, and advance the turns.

        postponed: requests that the others passed while loads were under way. Their parts keep
        their turns until they begin a load: if those others took them, loads of parts without such
        requests could come first for ever. Those of other parts count as passed over, too.
        """
        keeping = {self._name_of(waiting) for waiting in postponed}
        keeping -= {self._name_of(waiting) for waiting in requests if waiting.loads is not None}
        by_name: dict[str, list[Waiting]] = {}
        for waiting in requests:
            name = self._name_of(waiting)
            if name not in keeping:
                self._last = name
                self._parts.move_to_end(name)
            by_name.setdefault(name, []).append(waiting)
        for waiting in postponed:
            waiting.num_overtaken += self._name_of(waiting) not in by_name
        for name, theirs in by_name.items():
            part = self._parts[name]
            part.admitted(theirs, [other for other in postponed if self._name_of(other) == name])
            if not len(part):
                del self._parts[name]
        self._num_waiting -= len(requests)

    def in_order(
        self, policy: Policy, window: int, barred: Collection[str] = ()
    ) -> Iterator[Waiting]:
        """The requests that may be admitted, in turns; the parts divide the window.

        Visits a part only when its turn comes, and no part that is in `barred` by then. The queue
        must not change during the iteration; `barred` may grow.
        """
        share = max(1, window // max(1, len(self._parts)))
        orders = deque[tuple[str, Iterator[Waiting]]]()
        first = ((name, part.in_order(policy, share)) for name, part in self._parts.items())
        while (turn := next(first, None) or (orders.popleft() if orders else None)) is not None:
            name, order = turn
            if name not in barred and (waiting := next(order, None)) is not None:
                yield waiting
                orders.append(turn)

    def check(self) -> list[Waiting]:
        """All requests; AssertionError if an invariant fails."""
        found: list[Waiting] = []
        for name, part in self._parts.items():
            theirs = part.check()
            assert all(self._name_of(waiting) == name for waiting in theirs), "in a wrong line"
            found += theirs
        assert found or not self._parts, "an empty line is left"
        assert len(found) == self._num_waiting, "the number of waiting requests is wrong"
        return found


class WaitingQueue(Turns):
    """All waiting requests; clients take turns, and so do the users of each client."""

    def __init__(self) -> None:
        super().__init__(attrgetter("client"), lambda: Turns(_user, Line))
        self.by_id: dict[str, Waiting] = {}  # by request id

    def put(self, waiting: Waiting) -> None:
        super().put(waiting)
        self.by_id[waiting.request.id] = waiting

    def remove(self, waiting: Waiting) -> None:
        super().remove(waiting)
        del self.by_id[waiting.request.id]

    def admitted(self, requests: Sequence[Waiting], postponed: Sequence[Waiting] = ()) -> None:
        super().admitted(requests, postponed)
        for waiting in requests:
            del self.by_id[waiting.request.id]

    @property
    def clients(self) -> Collection[str]:
        """The clients with waiting requests."""
        return self._parts.keys()

    def is_full_for(self, client: str, limit: int) -> bool:
        """True if a new request of `client` must be refused.

        Once `limit` requests wait, a client may still queue requests up to an equal part of `limit`
        (divided among the waiting clients and this one), so that no client can lock others out.
        """
        if len(self) < limit:
            return False
        num_clients = len(self._parts.keys() | {client})
        return self.num_of(client) >= max(1, limit // num_clients)

    def check(self) -> list[Waiting]:
        found = super().check()
        assert set(found) == set(self.by_id.values()), "the queue and its index disagree"
        return found


_arrival = attrgetter("arrival")
_user = attrgetter("request.tenant.user")
