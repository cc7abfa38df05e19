"""What a trainer asks for is asked of all replicas, together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.router.adapters import ReplicaRefusedError, reason_of
from minisgl.router.exchange import HTTPRequest, read_request
from minisgl.router.fleet import Fleet, Replica, answer_of, probe
from minisgl.server.handlers import training, weight_transfer
from minisgl.server.http.auth import check_admin
from minisgl.server.http.encoding import json_response

logger = logging.getLogger(__name__)

ANSWER_S = 1800.0  # for a replica to take all weights
RETRY_S = 5.0  # until one that has started is asked again for what it has refused
FROM_DISK, FROM_GROUP, TRANSFERRED = (
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights",
)
JOIN, INIT = "/init_weights_update_group", "/init_weight_transfer_engine"
UPDATES = (FROM_DISK, FROM_GROUP, TRANSFERRED)
WORLD_SIZE, RENAME = "/get_world_size", "/update_weight_version"
# What keeps replicas from answering, and what ends it.
HOLDS = {
    "/sleep": "sleep",
    "/pause": "pause",
    "/pause_generation": "pause",
    "/start_weight_update": "update",
}
ENDS = {
    "/wake_up": "sleep",
    "/resume": "pause",
    "/continue_generation": "pause",
    "/finish_weight_update": "update",
}
TAGS = {"weights", "kv_cache"}  # of a sleep, which ends when both are awake


class FleetTraining:
    """Passes what a trainer asks for on to all replicas, one request after the other. They count as
    one engine with the ranks of all, in the order of the replicas."""

    def __init__(self, fleet: Fleet, admin_key: str, num_ranks: int) -> None:
        """num_ranks: of each replica."""
        self._fleet, self._admin_key, self._num_ranks = fleet, admin_key, num_ranks
        self._asking = asyncio.Lock()
        # What has made the weights other ones than those that a replica starts with.
        self._last_update: HTTPRequest | None = None
        self._last_name: HTTPRequest | None = None  # what has named them since
        self._holds: dict[str, list[HTTPRequest]] = {}  # by HOLDS; those after the first end a part

    def routes(self) -> list[Route]:
        endpoints = (*training.ENDPOINTS, *weight_transfer.ENDPOINTS)
        return [Route(each.path, self.ask, methods=[each.method]) for each in endpoints]

    async def ask(self, request: Request) -> Response:
        """The answer of one replica if all have done it, else which has not, and why."""
        check_admin(request.scope, self._admin_key)
        asked = await read_request(request.scope, request.receive)
        return await asyncio.shield(asyncio.ensure_future(self._ask(asked)))

    async def _ask(self, asked: HTTPRequest) -> Response:
        if asked.path in UPDATES:
            asked = _changed(asked, _name)
        async with self._asking:
            replicas = self._fleet.replicas
            running = [each for each in replicas if each.state.is_ready or each.state.refusal]
            answers = await asyncio.gather(*(self._answer(each, asked) for each in replicas))
            is_done = any(status == 200 for status, _ in answers)
            if is_done:
                self._hold(asked)
            if asked.path in UPDATES:
                # One that has ended, or is without weights now, may have begun.
                if is_done or any([await probe(each) != (True, "") for each in running]):
                    self._last_update, self._last_name = asked, None
            elif is_done and asked.path == "/sleep" and b"level=2" in asked.query:
                self._last_update = asked
            elif is_done and (asked.path == RENAME or b"weight_version" in asked.body):
                self._last_name = asked
        failed = [pair for pair in zip(replicas, answers, strict=True) if pair[1][0] != 200]
        if failed:
            raise ReplicaRefusedError(failed)
        if asked.path == WORLD_SIZE:
            return json_response(training.WorldSize(self._num_ranks * len(replicas)))
        return Response(answers[0][1], media_type="application/json")

    def _hold(self, asked: HTTPRequest) -> None:
        """Note what the fleet is kept from answering by, or that this has ended."""
        if asked.path in HOLDS:
            self._holds[HOLDS[asked.path]] = [asked]
        elif (held := self._holds.get(ENDS.get(asked.path, ""))) is not None:
            held.append(asked)
            queries = (parse_qs(each.query.decode("latin-1")) for each in held[1:])
            if {tag for each in queries for tag in each.get("tags", TAGS)} >= TAGS:
                del self._holds[ENDS[asked.path]]

    async def bring(self, index: int) -> bool:
        """Bring a replica that has started later to the weights of the others, if a folder has
        them, else to none, and then to what keeps the others from answering. Returns whether it is
        there; else it must take no requests, and be brought again."""
        async with self._asking:
            replica = self._fleet.replicas[index]
            is_there = await self._bring_weights(replica)
            names = filter(None, [self._last_name])
            for each in [*names, *chain.from_iterable(self._holds.values())]:
                # At level 2 a sleep would drop the weights, which may have come later.
                query = b"" if each.path == "/sleep" else each.query
                is_there = is_there and await self._has_done(replica, replace(each, query=query))
        if not is_there:
            await asyncio.sleep(RETRY_S)
        return is_there

    async def _bring_weights(self, replica: Replica) -> bool:
        if (last := self._last_update) is None:
            return True
        if last.path == FROM_DISK and await self._has_done(replica, last):
            return True
        drops = (("/sleep", b"level=2"), ("/wake_up", b""))
        for path, query in drops:
            asked = replace(last, path=path, raw_path=path.encode(), query=query, body=b"{}")
            if not await self._has_done(replica, asked):
                return False
        return True

    async def _has_done(self, replica: Replica, asked: HTTPRequest) -> bool:
        status, body = await self._answer(replica, asked)
        if status != 200:
            logger.error("Replica %d: %s: %s", replica.index, asked.path, reason_of(body))
        return status == 200

    async def _answer(self, replica: Replica, asked: HTTPRequest) -> tuple[int, bytes]:
        """Status and body; 503 if it does not answer."""

        def shift(told: dict[str, Any]) -> None:
            told.get("init_info", told)["rank_offset"] += replica.index * self._num_ranks

        if asked.path in (JOIN, INIT):
            asked = _changed(asked, shift)
        return await answer_of(replica, asked, ANSWER_S)


def _changed(asked: HTTPRequest, change: Callable[[dict[str, Any]], object]) -> HTTPRequest:
    """The same with another body; as it is, if replicas refuse that."""
    with suppress(msgspec.MsgspecError, TypeError, KeyError, AttributeError):
        told: dict[str, Any] = msgspec.json.decode(asked.body)
        change(told)
        return replace(asked, body=msgspec.json.encode(told))
    return asked


def _name(told: dict[str, Any]) -> None:
    """Give the weights of all replicas one name, if the trainer gives none."""
    if told.get("weight_version") is None:
        told["weight_version"] = secrets.token_hex(8)
