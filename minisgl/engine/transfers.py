"""Prefixes that one engine computes and another continues.

    prefill engine                                   decode engine
    compute, copy to host pages: an offer
    ◀─────────────── Want(key) ─────────────────────
    ──────────────── Offer(name, ranks) ───────────▶
    SEND to each rank ═════ bytes of its part ═════▶ RECEIVE by each rank, adopt

An adopted prefix is like one that was evicted to host memory: the request that needs it finds it in
the prefix cache, and waits for its load. Nothing waits for a transfer but the request itself, and
nothing depends on it: what does not come is computed.

Each rank exchanges its part with the same rank of the other engine (runner/page_exchange.py). The
pages of an offer are kept until no rank of this engine sends them any more, so what has come whole
is right, whoever dies meanwhile; a page counts once all ranks have received their parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import Struct

from minisgl.engine.stats import TransferStats
from minisgl.errors import EngineStoppedError
from minisgl.kvcache.manager import KVCacheManager, Transit
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.store import Done, Transfer, Way, page_keys
from minisgl.runner.page_wire import (
    SILENCE_S,
    Address,
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
NAME_BYTES = 16


class Want(Struct, array_like=True):
    """What an engine asks for: the pages of a prefix from `first` on."""

    fingerprint: bytes
    key: bytes
    first: int


class Offer(Struct, array_like=True):
    """The answer: what the ranks of the engine that asks may take, and where."""

    num_pages: int = 0
    name: bytes = b""
    ranks: tuple[str, ...] = ()
    refusal: str = ""  # why there are no pages


@dataclass(frozen=True, slots=True)
class Prefix:
    """The pages of a prompt that a cache can hold."""

    packed: bytes
    num_tokens: int  # of the prompt
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an engine exchanges pages with others."""

    address: Address
    token: bytes  # of the cluster
    ranks: tuple[str, ...]  # where its ranks listen
    fingerprint: bytes  # of everything but the tokens that the bytes of a page depend on
    page_bytes: int  # over all ranks


class Transfers:
    """The offers of one engine, and what it fetches from others. Used on the engine's loop."""

    def __init__(
        self,
        kv: KVCacheManager,
        sharing: Sharing,
        transfer: Callable[[Sequence[Transfer], Done], None],
        launch: Callable[[], None],
    ) -> None:
        """transfer: of the runner. launch: soon launches the plans that there are.

        Raises OSError if the address cannot be had.
        """
        self.stats = TransferStats()
        self._kv = kv
        self._sharing = sharing
        self._transfer = transfer
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._copying: list[tuple[Transit, asyncio.Future[bool]]] = []
        self._offers: dict[bytes, deque[Transit]] = {}  # by key, oldest first
        self._under_way: dict[int, asyncio.Future[int]] = {}  # transfers, by id
        self._turns = asyncio.Semaphore(NUM_RECEIVERS)
        self._asking = ThreadPoolExecutor(NUM_RECEIVERS, "minisgl-asking")
        self._server = PageServer(sharing.address, sharing.token, self._answer)

    @property
    def address(self) -> str:
        """Where other engines find this one."""
        return str(self._server.address)

    def prefix(self, token_ids: Sequence[int], namespace: bytes) -> Prefix:
        return Prefix(pack_tokens(token_ids), len(token_ids), namespace)

    def _num_pages(self, prefix: Prefix) -> int:
        return (prefix.num_tokens - 1) // self._kv.page_size

    def _key(self, prefix: Prefix) -> bytes:
        """The same on both sides, so that it need not travel with the request."""
        num_tokens = self._num_pages(prefix) * self._kv.page_size
        tokens = prefix.packed[: num_tokens * TOKEN_BYTES]
        fingerprint = self._sharing.fingerprint
        keys = page_keys(fingerprint, prefix.namespace, tokens, len(tokens), 0, 1)
        return next(keys)

    # -- sending -----------------------------------------------------------------------------------

    async def offer(self, prefix: Prefix) -> bool:
        """Offer what the device has of a prefix; False if it has nothing, or no room for it."""
        if self._closed:
            return False
        transit = self._kv.copy_out(prefix.packed, prefix.num_tokens, prefix.namespace)
        if transit is None:
            return False
        copied = self._loop.create_future()
        self._copying.append((transit, copied))
        self._launch()
        try:
            is_copied = await asyncio.shield(copied)
        except asyncio.CancelledError:
            copied.add_done_callback(lambda _: self._kv.drop(transit))
            raise
        if not is_copied:
            return False
        key = self._key(prefix)
        self._offers.setdefault(key, deque()).append(transit)
        self._loop.call_later(OFFER_S, self._expire, key, transit)
        return True

    def step_ended(self, step: int) -> None:
        """Look which offers are complete, or have failed, with the end of `step`."""
        if not self._copying:
            return
        left = []
        for transit, copied in self._copying:
            if transit.failed or self._kv.is_written(transit, step):
                copied.set_result(not transit.failed)
            else:
                left.append((transit, copied))
        self._copying = left

    def _take(self, key: bytes) -> Transit | None:
        waiting = self._offers.get(key)
        if not waiting:
            return None
        transit = waiting.popleft()
        if not waiting:
            del self._offers[key]
        return transit

    def _expire(self, key: bytes, transit: Transit) -> None:
        waiting = self._offers.get(key)
        if waiting and transit in waiting:
            waiting.remove(transit)
            if not waiting:
                del self._offers[key]
            self._kv.drop(transit)

    def _answer(self, peer: socket.socket) -> None:
        """Answer another engine. Called on a thread."""
        want = receive(peer, Want)
        granted: Future[Offer] = Future()

        def grant() -> None:
            try:
                granted.set_result(self._grant(want))
            except Exception as error:
                granted.set_exception(error)

        self._loop.call_soon_threadsafe(grant)
        try:
            offer = granted.result()
        except TransferError as error:
            offer = Offer(refusal=str(error))
        send(peer, offer)

    def _grant(self, want: Want) -> Offer:
        """Begin to send the pages that another engine wants. Raises TransferError."""
        if want.fingerprint != self._sharing.fingerprint:
            raise TransferError("the other engine has another model, --tp, KV dtype or page size")
        transit = self._take(want.key)
        if transit is None:
            raise TransferError("the other engine does not have the prefix")
        host_pages = tuple(transit.host_pages[max(0, want.first) :])
        if not host_pages:
            self._kv.drop(transit)
            raise TransferError("the other engine has no more of the prefix")
        name, began = secrets.token_bytes(NAME_BYTES), time.perf_counter()
        try:
            sending = self._begin(Way.SEND, host_pages, name)
        except TransferError:
            self._kv.drop(transit)
            raise

        def end(sent: asyncio.Future[int]) -> None:
            self._kv.drop(transit)
            if num_pages := sent.result():
                num_bytes = num_pages * self._sharing.page_bytes
                self.stats.sent.add(num_bytes, time.perf_counter() - began)

        sending.add_done_callback(end)
        return Offer(len(host_pages), name, self._sharing.ranks)

    # -- receiving ---------------------------------------------------------------------------------

    async def fetch(self, address: str, prefix: Prefix) -> bool:
        """Have the engine at `address` send what the prefix cache lacks of a prefix.

        Returns whether the cache has something of it then that it need not compute.
        """
        fetching = asyncio.ensure_future(self._fetch(address, prefix))
        # Threads write to the pages until the transfer has ended, whoever waits for it.
        return await asyncio.shield(fetching)

    async def _fetch(self, address: str, prefix: Prefix) -> bool:
        async with self._turns:
            matched = self._kv.match(prefix.packed, prefix.num_tokens, prefix.namespace)
            first = matched // self._kv.page_size
            num_missing = self._num_pages(prefix) - first
            if num_missing <= 0:
                return True
            transit = self._kv.expect(num_missing)
            if transit is None:
                return self._failed("host memory has no room for it")
            began = time.perf_counter()
            try:
                num_pages = await self._receive(address, prefix, first, transit)
            except TransferError as error:
                self._kv.drop(transit)
                return self._failed(str(error))
            self._kv.adopt(transit, prefix.packed, first, num_pages, prefix.namespace)
            if num_pages:
                num_bytes = num_pages * self._sharing.page_bytes
                self.stats.received.add(num_bytes, time.perf_counter() - began)
            return num_pages > 0

    async def _receive(self, address: str, prefix: Prefix, first: int, transit: Transit) -> int:
        """Receive pages of a prefix into those of `transit`; returns how many have come.

        Nobody writes to them any more then. Raises TransferError if none can come.
        """
        want = Want(self._sharing.fingerprint, self._key(prefix), first)
        try:
            asking = self._loop.run_in_executor(self._asking, self._ask, address, want)
        except RuntimeError:
            raise TransferError("the engine is being closed") from None
        offer = await asking
        host_pages = tuple(transit.host_pages[: offer.num_pages])
        if len(host_pages) != offer.num_pages or len(offer.ranks) != len(self._sharing.ranks):
            raise TransferError("the other engine offers what was not asked for")
        num_pages = await self._begin(Way.RECEIVE, host_pages, offer.name, offer.ranks)
        if num_pages < len(host_pages):
            reason = f"a rank of the other engine has ended, or was silent for {SILENCE_S:g} s"
            self._failed(f"{num_pages} of {len(host_pages)} pages have come: {reason}")
        return num_pages

    def _ask(self, address: str, want: Want) -> Offer:
        with connection(address, self._sharing.token) as peer:
            send(peer, want)
            offer = receive(peer, Offer)
        if offer.num_pages <= 0:
            raise TransferError(offer.refusal)
        return offer

    def _failed(self, reason: str) -> bool:
        """Count and log a prefix that has not come whole; returns False."""
        self.stats.num_failed += 1
        logger.warning("A prefix is computed here that was to be transferred: %s", reason)
        return False

    # -- both --------------------------------------------------------------------------------------

    def _begin(
        self, way: Way, host_pages: tuple[int, ...], name: bytes, peers: tuple[str, ...] = ()
    ) -> asyncio.Future[int]:
        """Begin a transfer; the result is the number of pages that every rank has done.

        Raises TransferError.
        """
        if self._closed:
            raise TransferError("the engine is being closed")
        transfer = Transfer(next(self._kv.transfer_ids), way, (), host_pages, name, peers)
        ended = self._under_way[transfer.id] = self._loop.create_future()
        try:
            self._transfer([transfer], self._on_ended)
        except EngineStoppedError as error:
            del self._under_way[transfer.id]
            raise TransferError(str(error)) from error
        return ended

    def _on_ended(self, transfer: int, num_pages: int) -> None:
        """Called by any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
            self._loop.call_soon_threadsafe(self._end, transfer, num_pages)

    def _end(self, transfer: int, num_pages: int) -> None:
        ended = self._under_way.pop(transfer, None)
        if ended is not None and not ended.done():  # it is cancelled where the loop ends
            ended.set_result(num_pages)

    def close(self) -> None:
        """Take part in no more transfers. Those under way count as failed: threads may still write
        to their pages, which no later step uses. Idempotent."""
        self._closed = True
        self._server.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        for _, copied in self._copying:
            copied.set_result(False)
        self._copying = []
        for transfer in list(self._under_way):
            self._end(transfer, 0)
