"""Adapters that are loaded on all replicas, and on those that start later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.errors import MinisglError
from minisgl.router.exchange import HTTPRequest, read_request
from minisgl.router.fleet import Fleet, Replica, answer_of
from minisgl.server.engine_state import NotReadyError
from minisgl.server.handlers.adapters import LOAD, UNLOAD, UnloadAdapter
from minisgl.server.http.auth import check_admin
from minisgl.server.http.error_bodies import Error

logger = logging.getLogger(__name__)

ANSWER_S = 300.0  # for a replica to load an adapter


class ReplicaRefusedError(MinisglError):
    """Replicas have not done what all were asked for."""

    code = "replica_refused"

    def __init__(self, answers: Sequence[tuple[Replica, tuple[int, bytes]]]) -> None:
        """answers: status and body, of these replicas."""
        reasons = (f"Replica {each.index}: {reason_of(body)}" for each, (_, body) in answers)
        super().__init__(" ".join(reasons))
        self.http_status = answers[0][1][0]


def reason_of(body: bytes) -> str:
    """Why a replica has not done what it was asked for. body: of its answer, empty if it has not
    answered."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(body, type=Error).error.message
    return "It has ended, or does not answer; ask again."


class FleetAdapters:
    """Passes what loads and unloads adapters on to all replicas, one request after the other."""

    def __init__(self, fleet: Fleet, admin_key: str, first: Collection[str] = ()) -> None:
        """first: the names of those that a replica has when it starts."""
        self._fleet = fleet
        self._admin_key = admin_key
        self._first = first
        # What makes of those that a replica has at its start what all have, by path and name, in
        # order.
        self._changes: dict[tuple[str, str], HTTPRequest] = {}
        self._changing = asyncio.Lock()

    async def change(self, request: Request) -> Response:
        """The answer of one replica if all have done it. A load that fails is undone."""
        check_admin(request.scope, self._admin_key)
        self._fleet.check_ready()
        asked = await read_request(request.scope, request.receive)
        return await asyncio.shield(asyncio.ensure_future(self._change(asked)))

    async def _change(self, asked: HTTPRequest) -> Response:
        is_load = asked.path == LOAD
        async with self._changing:
            replicas = [each for each in self._fleet.replicas if each.state.start]
            found = await asyncio.gather(*(self._ask(each, asked) for each in replicas))
            answers = {each: at for each, at in zip(replicas, found, strict=True) if at is not None}
            done = [each for each, (status, _) in answers.items() if status == 200]
            # Of an unload, one that does not have the adapter has done it, too.
            fine = (200, 404) if done and not is_load else (200,)
            failed = [each for each, (status, _) in answers.items() if status not in fine]
            if done:
                name = msgspec.json.decode(asked.body, type=UnloadAdapter).lora_name
                if is_load and failed and not self._had(name):
                    body = msgspec.json.encode(UnloadAdapter(name))
                    undo = replace(asked, path=UNLOAD, raw_path=UNLOAD.encode(), body=body)
                    await asyncio.gather(*(self._ask(each, undo) for each in done))
                elif not (is_load and failed):
                    self._changes.pop((LOAD, name), None)
                    if is_load or name in self._first:
                        self._changes[asked.path, name] = asked
            for replica in failed:
                raise ReplicaRefusedError([(replica, answers[replica])])
            if not done:
                raise NotReadyError("loading", "No replica takes requests yet.")
            return Response(answers[done[0]][1], media_type="text/plain")

    def _had(self, name: str) -> bool:
        """Whether all have an adapter of this name already, which loading it again keeps."""
        is_first = name in self._first and (UNLOAD, name) not in self._changes
        return is_first or (LOAD, name) in self._changes

    async def bring(self, index: int) -> None:
        """Ask a replica that has started for all that the others were asked for."""
        async with self._changing:
            for (path, name), asked in self._changes.items():
                replica = self._fleet.replicas[index]
                answer = await self._ask(replica, asked) or (503, b"")
                if answer[0] not in (200, 404):
                    error = ReplicaRefusedError([(replica, answer)])
                    logger.error("%s %s: %s", path, name, error)

    async def _ask(self, replica: Replica, asked: HTTPRequest) -> tuple[int, bytes] | None:
        """Status and body of the answer. None: it is starting, and is asked when it has."""
        status, body = await answer_of(replica, asked, ANSWER_S)
        runs = replica.state.is_ready or replica.state.is_silent
        return None if status == 503 and not runs else (status, body)
