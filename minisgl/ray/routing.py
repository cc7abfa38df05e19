"""Ray Serve's request router for the engines: the choice is the router's own, by prefix."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from minisgl.router.config import CACHE
from minisgl.router.exchange import HTTPRequest
from minisgl.router.table import RouteTable


class PrefixRouter(RequestRouter):
    """Chooses the engine for each call of EngineReplica.answer by the key of its request.

    Each process that sends calls has one, which knows what that process has sent. Loads are what
    the engines report with each answer, so they count the calls of all processes.
    """

    def initialize_state(self, policy: str = CACHE) -> None:
        """Called by Ray Serve with request_router_kwargs, before anything else."""
        self._table: RouteTable[ReplicaID] = RouteTable(policy)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others, in case that it is full."""
        candidates = self.select_available_replicas(candidate_replicas) or candidate_replicas
        if not candidates:
            return []
        by_id = {each.replica_id: each for each in candidates}
        # A load that was not heard of for seconds counts as none; the next answer tells it.
        loads = {id: self.replica_queue_len_cache.get(id) or 0 for id in by_id}
        asked = _asked(pending_request)
        key = asked.key if asked else None
        holders = [id for id in by_id if asked and id.unique_id == asked.holder]
        if holders:
            [chosen] = holders
        elif key is None:
            chosen = min(loads, key=loads.__getitem__)
        else:
            chosen = self._table.choose(key, loads)
        others = [each for id, each in by_id.items() if id != chosen]
        return [[by_id[chosen]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called when a replica has accepted a request."""
        asked = _asked(pending_request)
        if asked is not None and asked.key is not None:
            self._table.sent(asked.key, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with all replicas when some have come or gone."""
        gone = {*self.curr_replicas} - {each.replica_id for each in replicas}
        super().update_replicas(replicas)
        for id in gone:
            self._table.gone(id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.gone(replica_id)


def _asked(request: PendingRequest | None) -> HTTPRequest | None:
    """What the call is about; None for a call of another method."""
    asked = request.args[0] if request is not None and request.args else None
    return asked if isinstance(asked, HTTPRequest) else None
