"""Prefixes that one engine computes and another continues.

    prefill engine                                   decode engine
    compute, keep on the device: an offer
    ◀─────────────── Want(key) ─────────────────────
    ──────────────── Offer(name, ranks) ───────────▶
    SEND to each rank ═════ bytes of its part ═════▶ RECEIVE by each rank, adopt

Where one engine can map what is on the device of the other, pages go from the one device to the
other, and the request finds them in the prefix cache. Otherwise, or where too many are on their way
already, they go from host memory to host memory: the prefill engine copies them there first, and an
adopted prefix is like one that was evicted, so that the request waits for its load. Nothing waits
for a transfer but the request itself, and nothing depends on it: what does not come is computed.

Where a model has states or windowed layers, pages always go through host memory. After them comes
what a request needs beside them to go on (`PageGroup`). How much that is follows from their number
and place, so both sides know it.

Each rank exchanges its part with the same rank of the other engine
(tiers/peers/page_exchange.py). The pages of an offer are kept until no rank of this engine sends
them any more, so what has come whole is right, whoever dies meanwhile; a page counts once all ranks
have received their parts.

Where ranks divide the requests, one rank of each stage has all of a prefix. An offer names these,
and the receiving engine chooses the rank that gets the pages as it does for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from minisgl.distributed.addresses import Address, Listening
from minisgl.engine.stats import TransferStats, TransferTotals
from minisgl.errors import EngineStoppedError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Place
from minisgl.kvcache.page_keys import page_keys
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.transits import Transit, Transits
from minisgl.tiers.carriers.connections import (
    SILENCE_S,
    PageServer,
    TransferError,
    connection,
    receive,
    send,
)

logger = logging.getLogger(__name__)

# For which an offer that nobody has fetched keeps its pages.
OFFER_S = 60.0
NUM_RECEIVERS = 4  # prefixes at a time
# For which an engine is asked for host pages only, after nothing has come from its device.
INDIRECT_S = 60.0
NAME_BYTES = 16


class Want(Struct, array_like=True):
    """What an engine asks for: the pages of a prefix from `first` on."""

    fingerprint: bytes
    key: bytes
    first: int
    is_direct: bool = False  # from device to device, if they can


class Offer(Struct, array_like=True):
    """The answer: what the engine that asks may take, and where."""

    num_pages: int = 0
    name: bytes = b""
    ranks: tuple[str, ...] = ()  # that have the pages
    refusal: str = ""  # why there are no pages
    is_direct: bool = False
    num_beside: int = 0  # pages that come behind these, with what is beside them


class Prefix(NamedTuple):
    """The pages of a prompt that a cache can hold."""

    packed: bytes  # tokens
    num_tokens: int  # of the prompt
    namespace: bytes


@dataclass(frozen=True, slots=True)
class OwnSide:
    """An engine as others see it."""

    address: Address
    token: bytes  # of the cluster
    listening: Listening  # its ranks
    # Of everything but the tokens that the bytes of a page, and what is beside it, depend on.
    fingerprint: bytes
    page_bytes: int  # over all ranks that have a part of one


class PrefixExchange:
    """The offers of one engine, and what it fetches from others. Used on the engine's loop."""

    def __init__(
        self,
        kv: KVCacheManager,
        own: OwnSide,
        start: Callable[[], None],
        launch: Callable[[], None],
    ) -> None:
        """start: starts the moves that have begun, or raises EngineStoppedError. launch: soon
        launches the plans that there are.

        Raises OSError if the address cannot be had.
        """
        self.stats = TransferStats()
        self._kv = kv
        self._own = own
        self._start = start
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._offers: dict[Transit, bytes] = {}  # and the keys of their prefixes, oldest first
        self._indirect: dict[str, float] = {}  # until when, by the engine's address
        self._declining: set[asyncio.Future[None]] = set()
        self._turns = asyncio.Semaphore(NUM_RECEIVERS)
        self._asking = ThreadPoolExecutor(NUM_RECEIVERS, "minisgl-asking")
        self._server = PageServer(own.address, own.token, self._answer)

    @property
    def address(self) -> str:
        """Where other engines find this one."""
        return str(self._server.address)

    def _of(self, transit: Transit) -> Transits:
        """Those of the rank that has its pages."""
        return self._kv.of_ranks[transit.rank].tiers.transits

    def _num_pages(self, prefix: Prefix) -> int:
        return (prefix.num_tokens - 1) // self._kv.page_size

    def _key(self, prefix: Prefix) -> bytes:
        """The same on both sides, so that it need not travel with the request."""
        num_tokens = self._num_pages(prefix) * self._kv.page_size
        tokens = prefix.packed[: num_tokens * TOKEN_BYTES]
        fingerprint = self._own.fingerprint
        keys = page_keys(fingerprint, prefix.namespace, tokens, len(tokens), 0, 1)
        return next(keys)

    # -- sending -----------------------------------------------------------------------------------

    async def offer(self, token_ids: Sequence[int], namespace: bytes) -> bool:
        """Offer what the device has of a prompt; False if it has nothing, or no room for it."""
        if self._closed:
            return False
        prefix = Prefix(pack_tokens(token_ids), len(token_ids), namespace)
        of_ranks = [cache.tiers.transits for cache in self._kv.of_ranks]
        transits = max(of_ranks, key=lambda each: each.num_on_device(*prefix))
        transit = None
        if self._own.listening.is_direct:
            transit = transits.lend(*prefix)
        if transit is None:
            transit = await self._copied(partial(transits.copy_out, *prefix))
        if transit is None:
            return False
        self._offers[transit] = self._key(prefix)
        self._loop.call_later(OFFER_S, self._expire, transit)
        return True

    async def _copied(
        self, copy: Callable[[Callable[[bool], None]], Transit | None]
    ) -> Transit | None:
        """Have the next step copy pages to host memory, and wait for its end. None if there is no
        room, or the step fails."""
        copied: asyncio.Future[bool] = self._loop.create_future()
        transit = copy(copied.set_result)
        if transit is None:
            return None
        self._launch()
        try:
            return transit if await asyncio.shield(copied) else None
        except asyncio.CancelledError:
            copied.add_done_callback(lambda _: self._of(transit).drop(transit))
            raise

    def _take(self, key: bytes) -> Transit | None:
        """The oldest offer of a prefix, which is no longer one."""
        oldest = next((transit for transit, of in self._offers.items() if of == key), None)
        if oldest is not None:
            del self._offers[oldest]
        return oldest

    def _expire(self, transit: Transit) -> None:
        if self._offers.pop(transit, None) is not None:
            self._drop(transit)

    def _drop(self, transit: Transit) -> None:
        """End a transit; requests may have waited for its pages."""
        self._of(transit).drop(transit)
        if not self._closed:
            self._launch()

    def _answer(self, peer: socket.socket) -> None:
        """Answer another engine. Called on a thread."""
        grant = self._grant(receive(peer, Want))
        try:
            granted = asyncio.run_coroutine_threadsafe(grant, self._loop)
        except RuntimeError:  # the loop is closed
            grant.close()
            raise
        try:
            offer = granted.result()
        except TransferError as error:
            offer = Offer(refusal=str(error))
        except CancelledError:  # the loop is being closed
            return
        send(peer, offer)

    async def _grant(self, want: Want) -> Offer:
        """Begin to send the pages that another engine wants. Raises TransferError."""
        if want.fingerprint != self._own.fingerprint:
            raise TransferError(
                "the other engine has another model, --tp, --dp-attention, KV dtype, page size, "
                "--whole-pages or --speculative"
            )
        transit = self._take(want.key)
        if transit is None:
            raise TransferError("the other engine does not have the prefix")
        first = max(0, want.first)
        if first >= transit.num_pages:
            self._drop(transit)
            raise TransferError("the other engine has no more of the prefix")
        if transit.place is Place.DEVICE and not want.is_direct:
            transit = await self._copied(partial(self._of(transit).copy_lent, transit))
            if transit is None:
                raise TransferError("host memory of the other engine has no room for the prefix")
        (pages, num_beside), is_direct = transit.lacked_by(first), transit.place is Place.DEVICE
        name, began = secrets.token_bytes(NAME_BYTES), time.perf_counter()
        try:
            sending = self._begin(transit, pages, name)
        except TransferError:
            self._drop(transit)
            raise

        def end(sent: asyncio.Future[int]) -> None:
            self._drop(transit)
            self._count(self.stats.sent, sent.result(), began, is_direct=is_direct)

        sending.add_done_callback(end)
        num_pages = len(pages) - num_beside
        ranks = self._own.listening.ranks[transit.rank :: len(self._kv.of_ranks)]
        return Offer(num_pages, name, ranks, is_direct=is_direct, num_beside=num_beside)

    # -- receiving ---------------------------------------------------------------------------------

    async def fetch(self, address: str, token_ids: Sequence[int], namespace: bytes) -> bool:
        """Have the engine at `address` send what the prefix cache lacks of a prompt.

        Returns whether the cache has something of it then that it need not compute.
        """
        prefix = Prefix(pack_tokens(token_ids), len(token_ids), namespace)
        fetching = asyncio.ensure_future(self._fetch(address, prefix))
        # Threads write to the pages until the transfer has ended, whoever waits for it.
        return await asyncio.shield(fetching)

    async def _fetch(self, address: str, prefix: Prefix) -> bool:
        async with self._turns:
            cache = self._kv.best_for(*prefix)
            transits, matched = cache.tiers.transits, cache.match(*prefix)
            first = matched // self._kv.page_size
            num_missing = self._num_pages(prefix) - first
            if num_missing <= 0:
                declining = asyncio.ensure_future(self._decline(address, prefix))
                self._declining.add(declining)
                declining.add_done_callback(self._declining.discard)
                return True
            began = time.perf_counter()
            transit: Transit | None = None
            try:
                is_mapped = time.monotonic() >= self._indirect.get(address, 0.0)
                if self._own.listening.is_direct and is_mapped:
                    transit = transits.expect_on_device(
                        prefix.packed, first, num_missing, prefix.namespace
                    )
                key, is_direct = self._key(prefix), transit is not None
                offer = await self._ask(address, Want(self._own.fingerprint, key, first, is_direct))
                if not 0 < offer.num_pages <= num_missing:
                    raise TransferError("the other engine offers what was not asked for")
                if transit is not None and not offer.is_direct:
                    self._drop(transit)
                    transit = None
                if transit is None:
                    transit = transits.expect(offer.num_pages, first)
                if transit is None:
                    raise TransferError("host memory has no room for it")
                if offer.num_beside != len(transit.beside):
                    raise TransferError("the other engine offers other pages beside a prefix")
                num_pages = await self._receive(address, offer, transit)
            except TransferError as error:
                if transit is not None:
                    self._drop(transit)
                return self._failed(str(error))
            transits.adopt(transit, prefix.packed, first, num_pages, prefix.namespace)
            is_direct = transit.place is Place.DEVICE
            self._count(self.stats.received, num_pages, began, is_direct=is_direct)
            return cache.match(*prefix) > matched

    async def _decline(self, address: str, prefix: Prefix) -> None:
        """Take an offer of another engine without its pages, which it would keep for a minute."""
        want = Want(self._own.fingerprint, self._key(prefix), self._num_pages(prefix))
        with contextlib.suppress(TransferError):  # that there is no more of it
            await self._ask(address, want)

    async def _receive(self, address: str, offer: Offer, transit: Transit) -> int:
        """Receive pages into those of `transit`; returns how many have come.

        Nobody writes to them any more then. Raises TransferError if none can come.
        """
        num_attending = len(self._kv.of_ranks)
        # One for each rank of this engine; of those of a stage, only that of the transit receives.
        peers = tuple(rank for rank in offer.ranks for _ in range(num_attending))
        if len(peers) != len(self._own.listening.ranks):
            raise TransferError("the other engine has another number of ranks")
        num_all = offer.num_pages + offer.num_beside
        place, pages = transit.place, tuple(transit.pages[:num_all])
        num_pages = await self._begin(transit, pages, offer.name, peers)
        if num_pages < num_all:
            reason = f"a rank of the other engine has ended, or was silent for {SILENCE_S:g} s"
            if place is Place.DEVICE and not num_pages:
                reason += ", or what is on its device cannot be mapped"
                self._indirect[address] = time.monotonic() + INDIRECT_S
            self._failed(f"{num_pages} of {num_all} pages have come: {reason}")
        return num_pages

    async def _ask(self, address: str, want: Want) -> Offer:
        """What another engine offers. Raises TransferError."""

        def ask() -> Offer:
            with connection(address, self._own.token) as peer:
                send(peer, want)
                return receive(peer, Offer)

        try:
            asking = self._loop.run_in_executor(self._asking, ask)
        except RuntimeError:
            raise TransferError("the engine is being closed") from None
        offer = await asking
        if offer.refusal:
            raise TransferError(offer.refusal)
        return offer

    def _failed(self, reason: str) -> bool:
        """Count and log a prefix that has not come whole; returns False."""
        self.stats.num_failed += 1
        logger.warning("A prefix is computed here that was to be transferred: %s", reason)
        return False

    # -- both --------------------------------------------------------------------------------------

    def _count(
        self, totals: TransferTotals, num_pages: int, began: float, *, is_direct: bool
    ) -> None:
        if num_pages:
            num_bytes = num_pages * self._own.page_bytes
            totals.add(num_bytes, time.perf_counter() - began, is_direct=is_direct)

    def _begin(
        self, transit: Transit, pages: Sequence[int], name: bytes, peers: Sequence[str] = ()
    ) -> asyncio.Future[int]:
        """Begin to receive pages of a transit from `peers`, or to send some where there are none;
        the result is the number of pages that every rank has moved. Raises TransferError.
        """
        if self._closed:
            raise TransferError("the engine is being closed")
        ended = self._loop.create_future()

        def end(num_pages: int) -> None:
            if not ended.done():  # it is cancelled where the loop ends
                ended.set_result(num_pages)

        source, target = (Place.ENGINE, transit.place) if peers else (transit.place, Place.ENGINE)
        rank = transit.rank
        self._kv.moves.begin(source, target, pages, end, name=name, peers=peers, rank=rank)
        try:
            self._start()
        except EngineStoppedError as error:
            raise TransferError(str(error)) from error
        return ended

    def close(self) -> None:
        """Take part in no more moves. Those under way count as failed: threads may still write to
        their pages, which no later step uses. Idempotent."""
        self._closed = True
        self._server.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        for cache in self._kv.of_ranks:
            cache.tiers.transits.give_up()
        for move in self._kv.moves.under_way:
            if Place.ENGINE in (move.source, move.target):
                self._kv.moves.end(move.id, 0)
