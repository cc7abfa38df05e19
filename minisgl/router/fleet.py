"""The replicas as one routing process sees them: which take requests, and what each has to do."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from minisgl.router.config import DECODE, PREFILL
from minisgl.router.exchange import EngineLostError, HTTPRequest, code_of
from minisgl.router.table import MAX_KEY_BYTES, RouteTable
from minisgl.router.upstream import Upstream
from minisgl.server.engine_state import NotReadyError

MAX_IDLE = 256  # connections to a peer
# Of a prompt that are new to the replica that answers, for another one to compute it: some 500
# tokens, which no stream notices.
MIN_PREFILL_BYTES = 2048
# What becomes of prefills.
DONE, FAILED = "done", "failed"
# Codes of a replica that waits for a trainer.
WITHOUT_WEIGHTS = ("asleep", "weights_incomplete")
MAX_ATTEMPTS, PAUSE_S = 500, 0.01  # to connect
# A replica is silent that answers no probe within so many looks. However late this process itself
# is at one of them, as after a stop, it counts for one: the answer may have come meanwhile.
NUM_LOOKS, LOOK_S = 10, 0.5


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the parent process says of a replica."""

    is_ready: bool = False
    start: int = 0  # counts its starts; each begins with an empty cache
    is_silent: bool = False  # its process runs, and answers nothing
    refusal: str = ""  # of WITHOUT_WEIGHTS: why it takes none


@dataclass(slots=True, eq=False)
class Peer:
    """A server on a Unix socket, with the connections of this process to it."""

    index: int
    path: str
    idle: list[Upstream] = field(default_factory=list)

    async def connect(self) -> Upstream:
        """A connection that may be asked; raises EngineLostError."""
        while self.idle:
            upstream = self.idle.pop()
            if upstream.is_free:
                return upstream
        loop = asyncio.get_running_loop()
        for _ in range(MAX_ATTEMPTS):
            try:
                _, upstream = await loop.create_unix_connection(Upstream, self.path)
                return upstream
            except OSError as error:
                if error.errno != errno.EAGAIN:  # so many connections at once wait there
                    break
                await asyncio.sleep(PAUSE_S)
        raise EngineLostError

    async def get(self, path: str, accept: str = "*/*") -> tuple[int, bytes]:
        """Status and body of a document; raises EngineLostError."""
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\n\r\n"
        return await self.whole(head.encode())

    async def whole(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request; raises EngineLostError."""
        upstream = await self.connect()
        try:
            head = await upstream.ask(request, relays=False)
            return head.status, b"".join([piece async for piece in upstream.pieces()])
        finally:
            self.give_back(upstream)

    def give_back(self, upstream: Upstream) -> None:
        """Keep a connection for the next request, if its answer is complete."""
        if upstream.is_free and len(self.idle) < MAX_IDLE:
            self.idle.append(upstream)
        else:
            with suppress(RuntimeError):  # closed already
                upstream.abort()


async def answer_of(peer: Peer, asked: HTTPRequest, limit_s: float) -> tuple[int, bytes]:
    """Status and body; 503 and nothing if it does not answer within so many seconds."""
    with suppress(EngineLostError, TimeoutError):
        async with asyncio.timeout(limit_s):
            return await peer.whole(asked.encoded())
    return 503, b""


async def probe(peer: Peer) -> tuple[bool | None, str]:
    """Whether a replica takes requests, None if it does not answer; and why it waits for a trainer,
    if it does."""
    asking = asyncio.ensure_future(peer.get("/ready"))
    try:
        for _ in range(NUM_LOOKS):
            if not asking.done():
                await asyncio.wait([asking], timeout=LOOK_S)
        if not asking.done():
            return None, ""
        status, body = asking.result()
    except EngineLostError:
        return None, ""
    finally:
        asking.cancel()
    code = "" if status == 200 else code_of(body)
    is_ready = status == 200 or code == "queue_full"
    return is_ready, str(code) if code in WITHOUT_WEIGHTS else ""


@dataclass(slots=True, eq=False)
class Replica(Peer):
    """A replica, as far as this process knows it."""

    state: ReplicaState = field(default_factory=ReplicaState)
    num_open: int = 0  # requests
    unanswered: set[Upstream] = field(default_factory=set)  # those of requests without an answer
    role: str = ""  # one of ROLES; empty: it does whole requests, as all others

    async def connect(self) -> Upstream:
        upstream = await Peer.connect(self)
        self.unanswered.add(upstream)
        return upstream

    def give_back(self, upstream: Upstream) -> None:
        self.unanswered.discard(upstream)
        Peer.give_back(self, upstream)


class Route(NamedTuple):
    """The replicas through which a request goes."""

    replica: Replica  # which answers
    prefill: Replica | None = None  # which computes the prompt before that; None: `replica` does
    news_to: tuple[Replica, ...] = ()  # those that were not sent the prompt before


class Fleet:
    """All replicas, and the table by which requests are sent to them."""

    def __init__(self, paths: Sequence[str], policy: str, roles: Sequence[str] = ()) -> None:
        """roles: of each replica, or none."""
        self.replicas = [Replica(index, path) for index, path in enumerate(paths)]
        for replica, role in zip(self.replicas, roles, strict=False):
            replica.role = role
        self.is_draining = False
        self.num_sent: Counter[int] = Counter()  # requests, by replica
        self.num_resent = 0
        self.num_prefills: Counter[str] = Counter()  # by what became of them
        # Called with each key, and the index and the start of the replica that it was sent to.
        self.tell: Callable[[bytes, int, int], None] | None = None
        self._table: RouteTable[int] = RouteTable(policy)

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state.is_ready]

    @property
    def refusals(self) -> list[str]:
        """Why replicas wait for a trainer."""
        return [each.state.refusal for each in self.replicas if each.state.refusal]

    @property
    def num_open(self) -> int:
        return sum(replica.num_open for replica in self.replicas)

    def update(self, states: Sequence[ReplicaState]) -> None:
        """Take the states that the parent process reports, one for each replica."""
        for replica, state in zip(self.replicas, states, strict=True):
            if state.start != replica.state.start:
                self._table.gone(replica.index)
            replica.state = state
        if self.ready and not self.is_draining:
            # Do not wait for replicas that say nothing any more: their requests may never end. One
            # that still answers, even that it takes no requests, ends those that it has.
            for replica in self.replicas:
                if replica.state.is_silent:
                    for upstream in replica.unanswered:
                        upstream.abort()

    def check_ready(self) -> list[Replica]:
        """The replicas that take requests; raises NotReadyError if there is none."""
        if self.is_draining:
            raise NotReadyError("draining", "The server is shutting down.")
        ready = self.ready
        if not ready:
            code, why = "loading", "The model is still loading"
            for code in self.refusals:
                raise NotReadyError(code, "The replicas wait for a trainer to bring weights.")
            if any(replica.state.start > 1 for replica in self.replicas):
                code, why = "dead", "Every replica has ended, and is being started again"
            count = len(self.replicas)
            raise NotReadyError(code, f"{why} (ready: 0 of {count} replicas).")
        return ready

    def choose(self, key: bytes | None, avoided: Collection[object] = ()) -> Route:
        """The way of a request, not to one of `avoided` if there are others.

        key: None if the request neither reads nor fills a cache. Raises NotReadyError.
        """
        ready = self.check_ready()
        ready = [replica for replica in ready if replica not in avoided] or ready
        # Where no other is left, those for prefill do whole requests.
        candidates = [replica for replica in ready if replica.role != PREFILL] or ready
        if key is None:
            return Route(min(candidates, key=lambda replica: replica.num_open))
        chosen = self._best(key, candidates)
        prefill = self._prefill_for(key, chosen) if chosen.role == DECODE else None
        asked = [replica for replica in (chosen, prefill) if replica is not None]
        news_to = [replica for replica in asked if self._table.sent(key, replica.index)]
        return Route(chosen, prefill, tuple(news_to))

    def holding(self, name: str, avoided: Collection[object] = ()) -> Route | None:
        """The way to the replica that keeps responses under this name, if it takes requests.

        It computes the prompt itself: no other one knows what the request goes on from.
        """
        for replica in self.check_ready():
            if str(replica.index) == name and replica not in avoided:
                return Route(replica)
        return None

    def answered(self, key: bytes | None, route: Route, *, accepted: bool) -> None:
        """Note that the answer has begun, or that the request was refused.

        Until then the prompt counts as sent, so that others with its prefix follow it.
        """
        if key is None:
            return
        if not accepted:
            for replica in route.news_to:
                self._table.refused(key, replica.index)
        elif self.tell is not None:
            for asked in filter(None, (route.replica, route.prefill)):
                self.tell(key, asked.index, asked.state.start)

    def _best(self, key: bytes, candidates: Sequence[Replica]) -> Replica:
        loads = {replica.index: replica.num_open for replica in candidates}
        return self.replicas[self._table.choose(key, loads)]

    def _prefill_for(self, key: bytes, replica: Replica) -> Replica | None:
        """Who computes the prompt for `replica`; None if it was sent most of it before."""
        known = self._table.matches(key, [replica.index])[replica.index]
        if min(len(key), MAX_KEY_BYTES) - known < MIN_PREFILL_BYTES:
            return None
        candidates = [each for each in self.ready if each.role == PREFILL]
        if candidates:
            return self._best(key, candidates)
        self.num_prefills[FAILED] += 1
        return None

    def hear(self, key: bytes, index: int, start: int) -> None:
        """Note what another routing process has sent to a replica."""
        if self.replicas[index].state.start == start:
            self._table.sent(key, index)
