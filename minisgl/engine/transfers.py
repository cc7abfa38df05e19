"""Prefixes that one engine computes and another continues.

    prefill engine   compute the prompt, gather its pages, DMA to host pages: an offer
    decode engine    ask for it, receive the bytes into its own host pages, adopt them

An adopted prefix is like one that was evicted to host memory: the request that needs it finds it in
the prefix cache, and waits for its load. Nothing waits for a transfer but the request itself, and
nothing depends on it: what does not come is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from minisgl.engine.page_wire import PageServer, TransferError, Want, receive_pages
from minisgl.engine.stats import TransferStats
from minisgl.kvcache.manager import KVCacheManager, Transit
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.store import page_keys

logger = logging.getLogger(__name__)

# For which an offer that nobody has fetched keeps its pages.
OFFER_S = 60.0
NUM_RECEIVERS = 4  # transfers at a time


@runtime_checkable
class HostMemory(Protocol):
    """A runner whose host pages are in this process."""

    def host_views(self, host_pages: Sequence[int]) -> Sequence[memoryview]:
        """The bytes of host pages, once no launched copy is under way to or from them.

        Blocks until then; any thread may call it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """The pages of a prompt that a cache can hold."""

    packed: bytes
    num_tokens: int  # of the prompt
    namespace: bytes


class Transfers:
    """The offers of one engine, and what it fetches from others. Used on the engine's loop."""

    def __init__(
        self,
        kv: KVCacheManager,
        memory: HostMemory,
        fingerprint: bytes,
        path: str,
        launch: Callable[[], None],
    ) -> None:
        """fingerprint: of everything but the tokens that the bytes of a page depend on.

        launch: soon launches the plans that there are.
        """
        self.stats = TransferStats()
        self._kv = kv
        self._memory = memory
        self._fingerprint = fingerprint
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._copying: list[tuple[Transit, asyncio.Future[None]]] = []
        self._offers: dict[bytes, deque[Transit]] = {}  # by key, oldest first
        self._receivers = ThreadPoolExecutor(NUM_RECEIVERS, "minisgl-receiving")
        self._server = PageServer(path, self._opened)

    def prefix(self, token_ids: Sequence[int], namespace: bytes) -> Prefix:
        return Prefix(pack_tokens(token_ids), len(token_ids), namespace)

    def _num_pages(self, prefix: Prefix) -> int:
        return (prefix.num_tokens - 1) // self._kv.page_size

    def _key(self, prefix: Prefix) -> bytes:
        """The same on both sides, so that it need not travel with the request."""
        num_tokens = self._num_pages(prefix) * self._kv.page_size
        tokens = prefix.packed[: num_tokens * TOKEN_BYTES]
        keys = page_keys(self._fingerprint, prefix.namespace, tokens, len(tokens), 0, 1)
        return next(keys)

    # -- sending -----------------------------------------------------------------------------------

    async def offer(self, prefix: Prefix) -> bool:
        """Offer what the device has of a prefix; False if it has nothing, or no room for it."""
        transit = self._kv.copy_out(prefix.packed, prefix.num_tokens, prefix.namespace)
        if transit is None:
            return False
        copied = self._loop.create_future()
        self._copying.append((transit, copied))
        self._launch()
        try:
            await asyncio.shield(copied)
        except asyncio.CancelledError:
            copied.add_done_callback(lambda _: self._kv.drop(transit))
            raise
        if transit.failed:
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
                copied.set_result(None)
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

    @contextmanager
    def _opened(self, want: Want) -> Iterator[tuple[int, Iterable[memoryview]]]:
        """The pages that another engine wants. Called on a thread."""
        if want.fingerprint != self._fingerprint:
            raise TransferError("the other engine has another model, KV dtype or page size")
        transit = self._on_loop(lambda: self._take(want.key))
        if transit is None:
            raise TransferError("the other engine does not have the prefix")
        num_bytes, began = 0, time.perf_counter()
        try:
            host_pages = transit.host_pages[want.first :]
            if want.first < 0 or not host_pages:
                raise TransferError("the other engine has no more of the prefix")
            views = self._memory.host_views(host_pages)
            yield len(host_pages), views
            num_bytes = sum(map(len, views))
        finally:
            seconds = time.perf_counter() - began

            def end() -> None:
                self._kv.drop(transit)
                if num_bytes:
                    self.stats.sent.add(num_bytes, seconds)

            self._loop.call_soon_threadsafe(end)

    def _on_loop(self, call: Callable[[], Transit | None]) -> Transit | None:
        async def run() -> Transit | None:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    # -- receiving ---------------------------------------------------------------------------------

    async def fetch(self, path: str, prefix: Prefix) -> bool:
        """Have the engine that listens at `path` send what the prefix cache lacks of a prefix.

        Returns whether the cache has something of it then that it need not compute.
        """
        fetching = asyncio.ensure_future(self._fetch(path, prefix))
        # Threads write to the pages until the transfer has ended, whoever waits for it.
        return await asyncio.shield(fetching)

    async def _fetch(self, path: str, prefix: Prefix) -> bool:
        matched = self._kv.match(prefix.packed, prefix.num_tokens, prefix.namespace)
        first = matched // self._kv.page_size
        num_missing = self._num_pages(prefix) - first
        if num_missing <= 0:
            return True
        transit = self._kv.expect(num_missing)
        if transit is None:
            return self._failed("host memory has no room for it")
        num_bytes, began = 0, time.perf_counter()

        def into(num_pages: int) -> Sequence[memoryview]:
            nonlocal num_bytes
            if num_pages > num_missing:
                raise TransferError("the other engine has sent too many pages")
            views = self._memory.host_views(transit.host_pages[:num_pages])
            num_bytes = sum(map(len, views))
            return views

        want = Want(self._fingerprint, self._key(prefix), first)
        try:
            num_pages = await self._loop.run_in_executor(
                self._receivers, receive_pages, path, want, into
            )
        except (TransferError, RuntimeError) as error:  # RuntimeError: the engine is being closed
            self._kv.drop(transit)
            return self._failed(str(error))
        self._kv.adopt(transit, prefix.packed, first, num_pages, prefix.namespace)
        self.stats.received.add(num_bytes, time.perf_counter() - began)
        return True

    def _failed(self, reason: str) -> bool:
        self.stats.num_failed += 1
        logger.warning("A prefix is computed here that was to be transferred: %s", reason)
        return False

    def close(self) -> None:
        """Take part in no more transfers. Those under way end by themselves."""
        self._server.close()
        self._receivers.shutdown(wait=False, cancel_futures=True)
        for _, copied in self._copying:
            copied.cancel()
        self._copying = []
