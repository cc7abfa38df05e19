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
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import Struct

from minisgl.engine.stats import TransferStats, TransferTotals
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
    """The answer: what the ranks of the engine that asks may take, and where."""

    num_pages: int = 0
    name: bytes = b""
    ranks: tuple[str, ...] = ()
    refusal: str = ""  # why there are no pages
    is_direct: bool = False


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
    is_direct: bool = False  # other engines may map what is on the device of a rank


@dataclass(frozen=True, slots=True)
class _Offered:
    """A prefix for which another engine is to come."""

    prefix: Prefix
    transit: Transit


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
        self._offers: dict[bytes, deque[_Offered]] = {}  # by key, oldest first
        self._indirect: dict[str, float] = {}  # until when, by the engine's address
        self._under_way: dict[int, asyncio.Future[int]] = {}  # transfers, by id
        self._declining: set[asyncio.Future[None]] = set()
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
        transit = None
        if self._sharing.is_direct:
            transit = self._kv.lend(prefix.packed, prefix.num_tokens, prefix.namespace)
        if transit is None:
            transit = self._kv.copy_out(prefix.packed, prefix.num_tokens, prefix.namespace)
            if transit is None or not await self._is_copied(transit):
                return False
        key, offered = self._key(prefix), _Offered(prefix, transit)
        self._offers.setdefault(key, deque()).append(offered)
        self._loop.call_later(OFFER_S, self._expire, key, offered)
        return True

    async def _is_copied(self, transit: Transit) -> bool:
        """Wait for the step that copies pages out; False if it fails, which frees them."""
        copied = self._loop.create_future()
        self._copying.append((transit, copied))
        self._launch()
        try:
            return await asyncio.shield(copied)
        except asyncio.CancelledError:
            copied.add_done_callback(lambda _: self._kv.drop(transit))
            raise

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

    def _take(self, key: bytes) -> _Offered | None:
        waiting = self._offers.get(key)
        if not waiting:
            return None
        offered = waiting.popleft()
        if not waiting:
            del self._offers[key]
        return offered

    def _expire(self, key: bytes, offered: _Offered) -> None:
        waiting = self._offers.get(key)
        if waiting and offered in waiting:
            waiting.remove(offered)
            if not waiting:
                del self._offers[key]
            self._drop(offered.transit)

    def _drop(self, transit: Transit) -> None:
        """End a transit; requests may have waited for its pages."""
        self._kv.drop(transit)
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
        if want.fingerprint != self._sharing.fingerprint:
            raise TransferError("the other engine has another model, --tp, KV dtype or page size")
        offered = self._take(want.key)
        if offered is None:
            raise TransferError("the other engine does not have the prefix")
        transit = offered.transit
        first = max(0, want.first)
        if first >= len(transit.pages or transit.host_pages):
            self._drop(transit)
            raise TransferError("the other engine has no more of the prefix")
        if transit.pages and not want.is_direct:
            prefix = offered.prefix
            copy = self._kv.copy_out(prefix.packed, prefix.num_tokens, prefix.namespace)
            self._kv.drop(transit)
            if copy is None or not await self._is_copied(copy):
                raise TransferError("host memory of the other engine has no room for the prefix")
            transit = copy
        pages, host_pages = tuple(transit.pages[first:]), tuple(transit.host_pages[first:])
        name, began = secrets.token_bytes(NAME_BYTES), time.perf_counter()
        try:
            sending = self._begin(Way.SEND, name, host_pages, pages)
        except TransferError:
            self._drop(transit)
            raise

        def end(sent: asyncio.Future[int]) -> None:
            self._drop(transit)
            self._count(self.stats.sent, sent.result(), began, is_direct=bool(pages))

        sending.add_done_callback(end)
        num_pages = len(pages or host_pages)
        return Offer(num_pages, name, self._sharing.ranks, is_direct=bool(pages))

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
                declining = asyncio.ensure_future(self._decline(address, prefix))
                self._declining.add(declining)
                declining.add_done_callback(self._declining.discard)
                return True
            began = time.perf_counter()
            transit: Transit | None = None
            try:
                if self._is_direct(address):
                    transit = self._kv.expect_on_device(
                        prefix.packed, first, num_missing, prefix.namespace
                    )
                key, is_direct = self._key(prefix), transit is not None
                offer = await self._ask(
                    address, Want(self._sharing.fingerprint, key, first, is_direct)
                )
                if not 0 < offer.num_pages <= num_missing:
                    raise TransferError("the other engine offers what was not asked for")
                if transit is not None and not offer.is_direct:
                    self._drop(transit)
                    transit = None
                if transit is None:
                    transit = self._kv.expect(offer.num_pages)
                if transit is None:
                    raise TransferError("host memory has no room for it")
                num_pages = await self._receive(address, offer, transit)
            except TransferError as error:
                if transit is not None:
                    self._drop(transit)
                return self._failed(str(error))
            self._kv.adopt(transit, prefix.packed, first, num_pages, prefix.namespace)
            self._count(self.stats.received, num_pages, began, is_direct=bool(transit.pages))
            return num_pages > 0

    async def _decline(self, address: str, prefix: Prefix) -> None:
        """Take an offer of another engine without its pages, which it would keep for a minute."""
        want = Want(self._sharing.fingerprint, self._key(prefix), self._num_pages(prefix))
        with contextlib.suppress(TransferError):  # that there is no more of it
            await self._ask(address, want)

    def _is_direct(self, address: str) -> bool:
        """Whether to ask for pages on the device of an engine."""
        return self._sharing.is_direct and time.monotonic() >= self._indirect.get(address, 0.0)

    async def _receive(self, address: str, offer: Offer, transit: Transit) -> int:
        """Receive pages into those of `transit`; returns how many have come.

        Nobody writes to them any more then. Raises TransferError if none can come.
        """
        if len(offer.ranks) != len(self._sharing.ranks):
            raise TransferError("the other engine has another number of ranks")
        pages = tuple(transit.pages[: offer.num_pages])
        host_pages = tuple(transit.host_pages[: offer.num_pages])
        num_pages = await self._begin(Way.RECEIVE, offer.name, host_pages, pages, offer.ranks)
        if num_pages < offer.num_pages:
            reason = f"a rank of the other engine has ended, or was silent for {SILENCE_S:g} s"
            if pages and not num_pages:
                reason += ", or what is on its device cannot be mapped"
                self._indirect[address] = time.monotonic() + INDIRECT_S
            self._failed(f"{num_pages} of {offer.num_pages} pages have come: {reason}")
        return num_pages

    async def _ask(self, address: str, want: Want) -> Offer:
        """What another engine offers. Raises TransferError."""

        def ask() -> Offer:
            with connection(address, self._sharing.token) as peer:
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
            num_bytes = num_pages * self._sharing.page_bytes
            totals.add(num_bytes, time.perf_counter() - began, is_direct=is_direct)

    def _begin(
        self,
        way: Way,
        name: bytes,
        host_pages: tuple[int, ...],
        pages: tuple[int, ...],
        peers: tuple[str, ...] = (),
    ) -> asyncio.Future[int]:
        """Begin a transfer of host pages, or of pages on the device; the result is the number of
        pages that every rank has done.

        Raises TransferError.
        """
        if self._closed:
            raise TransferError("the engine is being closed")
        transfer = Transfer(next(self._kv.transfer_ids), way, (), host_pages, name, peers, pages)
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
