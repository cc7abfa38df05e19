"""The running requests, each with a slot, and what their clients may have of the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import ValuesView
from itertools import filterfalse
from operator import attrgetter

from minisgl.scheduler.state import Running


class Slots:
    """The slots of the device tables: free, or with a running request."""

    def __init__(self, num_slots: int, client_share: float) -> None:
        """client_share: see `has_its_share`."""
        self.by_id: dict[str, Running] = {}  # by request id, in order of admission
        self.num_masked = 0  # requests with a matcher
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._client_share = client_share
        self._num_of = Counter[str]()  # running requests of each client

    @property
    def running(self) -> ValuesView[Running]:
        """The running requests, in order of admission."""
        return self.by_id.values()

    @property
    def are_full(self) -> bool:
        return not self._free

    def take(self) -> int:
        """A free slot, for the request that joins next."""
        return self._free.pop()

    def join(self, running: Running) -> None:
        self.by_id[running.request.id] = running
        self._num_of[running.client] += 1
        self.num_masked += running.request.matcher is not None

    def leave(self, running: Running) -> None:
        self._free.append(running.slot)
        del self.by_id[running.request.id]
        self._num_of[running.client] -= 1
        if not self._num_of[running.client]:
            del self._num_of[running.client]
        self.num_masked -= running.request.matcher is not None
        running.active = False

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

    def victim(self, page_size: int) -> Running:
        """The running request to retract: the newest of the client with the most running requests.

        Never the oldest request of all, so that one always advances; and a resumed request is
        spared, if possible, until it has generated a page of tokens.
        """

        def is_spared(running: Running) -> bool:
            return running.resumed and running.num_scheduled - running.num_to_prefill < page_size

        newest = sorted(self.running, key=attrgetter("arrival"), reverse=True)[:-1]
        newest.sort(key=lambda running: -self._num_of[running.client])  # stable
        return next(filterfalse(is_spared, newest), newest[0])

    def audit(self) -> None:
        """Recompute what is counted; AssertionError if it is wrong."""
        assert self._num_of == Counter(running.client for running in self.running)
        slots = [running.slot for running in self.running]
        assert len(set(slots) | set(self._free)) == len(slots) + len(self._free) == self._num_slots
        masked = [running for running in self.running if running.request.matcher is not None]
        assert self.num_masked == len(masked)
        assert all(running.active for running in self.running)
