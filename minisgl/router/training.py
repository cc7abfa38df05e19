"""What a trainer asks for is asked of all replicas, together."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.router.adapters import ReplicaRefusedError, reason_of
from minisgl.router.exchange import HTTPRequest, read_request
from minisgl.router.fleet import Fleet, Replica, answer_of
from minisgl.server.handlers import training, weight_transfer
from minisgl.server.http.auth import check_admin
from minisgl.server.http.encoding import json_response

logger = logging.getLogger(__name__)

ANSWER_S = 1800.0  # for a replica to take all weights
FROM_DISK, FROM_GROUP, TRANSFERRED = (
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights",
)
JOIN, INIT = "/init_weights_update_group", "/init_weight_transfer_engine"
WORLD_SIZE = "/get_world_size"


class FleetTraining:
    """Passes what a trainer asks for on to all replicas, one request after the other. They count as
    one engine with the ranks of all, in the order of the replicas."""

    def __init__(self, fleet: Fleet, admin_key: str, num_ranks: int) -> None:
        """num_ranks: of each replica."""
        self._fleet, self._admin_key, self._num_ranks = fleet, admin_key, num_ranks
        self._asking = asyncio.Lock()
        self._last_update: HTTPRequest | None = None

    def routes(self) -> list[Route]:
        endpoints = (*training.ENDPOINTS, *weight_transfer.ENDPOINTS)
        return [Route(each.path, self.ask, methods=[each.method]) for each in endpoints]

    async def ask(self, request: Request) -> Response:
        """The answer of one replica if all have done it, else which has not, and why."""
        check_admin(request.scope, self._admin_key)
        asked = await read_request(request.scope, request.receive)
        return await asyncio.shield(asyncio.ensure_future(self._ask(asked)))

    async def _ask(self, asked: HTTPRequest) -> Response:
        async with self._asking:
            replicas = self._fleet.replicas
            answers = await asyncio.gather(*(self._answer(each, asked) for each in replicas))
            is_update = asked.path in (FROM_DISK, FROM_GROUP, TRANSFERRED)
            if is_update and any(status == 200 for status, _ in answers):
                self._last_update = asked
        failed = [pair for pair in zip(replicas, answers, strict=True) if pair[1][0] != 200]
        if failed:
            raise ReplicaRefusedError(failed)
        if asked.path == WORLD_SIZE:
            return json_response(training.WorldSize(self._num_ranks * len(replicas)))
        return Response(answers[0][1], media_type="application/json")

    async def bring(self, index: int) -> None:
        """Bring a replica that has started later to the weights of the others, if a folder has
        them. Otherwise it takes no requests before a whole update."""
        async with self._asking:
            if (last := self._last_update) is None:
                return
            replica = self._fleet.replicas[index]
            if last.path == FROM_DISK:
                status, body = await self._answer(replica, last)
                if status == 200:
                    return
                logger.error("Replica %d has no weights: %s", index, reason_of(body))
            for path, query in (("/sleep", b"level=2"), ("/wake_up", b"")):
                asked = replace(last, path=path, raw_path=path.encode(), query=query, body=b"{}")
                await self._answer(replica, asked)

    async def _answer(self, replica: Replica, asked: HTTPRequest) -> tuple[int, bytes]:
        """Status and body; 503 if it does not answer."""
        if asked.path in (JOIN, INIT):
            asked = replace(asked, body=_as_ranks_of(replica, asked.body, self._num_ranks))
        return await answer_of(replica, asked, ANSWER_S)


def _as_ranks_of(replica: Replica, body: bytes, num_ranks: int) -> bytes:
    """What has a replica join a group, with the rank that its first one has there."""
    with suppress(msgspec.MsgspecError, TypeError, KeyError, AttributeError):
        told: dict[str, Any] = msgspec.json.decode(body)
        told.get("init_info", told)["rank_offset"] += replica.index * num_ranks
        return msgspec.json.encode(told)
    return body  # which the replica refuses
