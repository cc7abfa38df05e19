"""The running requests, each with a slot, and what their clients may have of the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, ValuesView
from itertools import filterfalse
from operator import attrgetter

from minisgl.scheduler.parts import Part
from minisgl.scheduler.state import Running


class Slots:
    """The slots of the device tables: free, or with a running request."""

    def __init__(
        self, num_slots: int, client_share: float, num_ranks: int = 1, parts: Sequence[Part] = ()
    ) -> None:
        """client_share: see `has_its_share`. num_ranks: that divide the requests. Each has as many
        slots, those of rank 0 come first."""
        self.by_id: dict[str, Running] = {}  # by request id, in order of admission
        self._parts = parts
        self._num_concerned = Counter[Part]()
        self.parts = self._present()  # that always take part in steps, or for running requests
        self._num_each = num_slots // num_ranks
        each = range(self._num_each - 1, -1, -1)
        self._free = [[rank * self._num_each + slot for slot in each] for rank in range(num_ranks)]
        self._num_slots = num_slots
        self._client_share = client_share
        self._num_of = Counter[str]()  # running requests of each client

    @property
    def running(self) -> ValuesView[Running]:
        """The running requests, in order of admission."""
        return self.by_id.values()

    @property
    def are_full(self) -> bool:
        return not any(self._free)

    def rank_of(self, slot: int) -> int:
        return slot // self._num_each

    def take(self, rank: int) -> int:
        """A free slot of a rank, for the request that joins next."""
        return self._free[rank].pop()

    def join(self, running: Running) -> None:
        self.by_id[running.request.id] = running
        self._num_of[running.client] += 1
        self._count(running, 1)

    def leave(self, running: Running) -> None:
        self._free[running.lease.rank].append(running.slot)
        del self.by_id[running.request.id]
        self._num_of[running.client] -= 1
        if not self._num_of[running.client]:
            del self._num_of[running.client]
        self._count(running, -1)
        running.active = False

    def _count(self, running: Running, change: int) -> None:
        """Note that a request, and the parts that it concerns, come or go."""
        concerned = [part for part in self._parts if part.concerns(running.request)]
        if concerned:
            for part in concerned:
                self._num_concerned[part] += change
            self.parts = self._present()

    def _present(self) -> list[Part]:
        return [part for part in self._parts if part.is_always or self._num_concerned[part]]

    def has_its_share(self, client: str) -> bool:
        """Whether a client has as many running requests as it may. So a slot is free for another
        client at any time, unless there are more clients than slots. Callers that are not
        distinguished are no client, and may take all slots."""
        if not client:
            return False
        num_running = self._num_of[client]
        num_left = self._num_slots - (len(self.by_id) - num_running)  # by the other clients
        return num_running >= max(1, int(self._client_share * num_left))

    def num_left_free(self, client: str, num_tokens: int) -> float:
        """How many of `num_tokens` in the KV cache must be left free for other clients when a
        request of this one joins. A client's only request may take them."""
        if not client or not self._num_of[client]:
            return 0
        return (1 - self._client_share) * num_tokens

    def victim(self, page_size: int, rank: int = 0) -> Running:
        """The running request of a rank to retract: the newest of the client with the most running
        requests.

        Never the oldest of the rank's requests, so that one always advances; and a resumed request
        is spared, if possible, until it has generated a page of tokens.
        """

        def is_spared(running: Running) -> bool:
            return running.resumed and running.num_scheduled - running.num_to_prefill < page_size

        own = [running for running in self.running if running.lease.rank == rank]
        newest = sorted(own, key=attrgetter("arrival"), reverse=True)[:-1]
        newest.sort(key=lambda running: -self._num_of[running.client])  # stable
        return next(filterfalse(is_spared, newest), newest[0])

    def audit(self) -> None:
        """Recompute what is counted; AssertionError if it is wrong."""
        assert self._num_of == Counter(running.client for running in self.running)
        for rank, free in enumerate(self._free):
            taken = [running.slot for running in self.running if running.lease.rank == rank]
            own = range(rank * self._num_each, (rank + 1) * self._num_each)
            assert sorted(taken + free) == [*own], "a slot is lost, or of another rank"
        for part in self._parts:
            concerned = [running for running in self.running if part.concerns(running.request)]
            assert self._num_concerned[part] == len(concerned)
        assert all(running.active for running in self.running)
