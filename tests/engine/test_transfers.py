"""Prefixes handed from one engine to another: offers, fetches, and what may go wrong with both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from minisgl.engine import transfers
from minisgl.engine.transfers import Prefix, Transfers
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens

PAGE, PAGE_BYTES = 4, 1000
TOKENS = [*range(30)]  # seven pages can be cached
NUM_PAGES = 7


class Side:
    """An engine as far as transfers go: a KV cache, host memory, and steps without a model."""

    def __init__(self, folder: Path, name: str, fingerprint: bytes, num_host_pages: int) -> None:
        self.path = str(folder / name)
        self.kv = KVCacheManager(
            num_pages=40, page_size=PAGE, cache_type="radix", num_host_pages=num_host_pages
        )
        self.memory = bytearray(num_host_pages * PAGE_BYTES)
        self.step = 0
        self.fails = False
        self.transfers = Transfers(self.kv, self, fingerprint, self.path, self.launch)

    def host_views(self, host_pages: Sequence[int]) -> Sequence[memoryview]:
        memory = memoryview(self.memory)
        return [memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in host_pages]

    def launch(self) -> None:
        """Run a step that copies device page N as bytes of value N."""
        self.step += 1
        copies = self.kv.take_copies(self.step)
        if self.fails:
            self.kv.drop_written_since(self.step)
        elif copies is not None:
            for page, host_page in copies.offloads:
                (view,) = self.host_views([host_page])
                view[:] = bytes([page]) * PAGE_BYTES
        asyncio.get_running_loop().call_soon(self.transfers.step_ended, self.step)

    def compute(self, tokens: Sequence[int]) -> bytes:
        """Leave a prompt in the cache; returns what its host pages will hold."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        pages = lease.pages[: (len(tokens) - 1) // PAGE]
        self.kv.close(lease, pack_tokens(tokens), len(tokens), self.step)
        return b"".join(bytes([page]) * PAGE_BYTES for page in pages)

    def prefix(self, tokens: Sequence[int] = TOKENS, namespace: bytes = b"") -> Prefix:
        return self.transfers.prefix(tokens, namespace)

    def held(self, tokens: Sequence[int] = TOKENS) -> bytes:
        """The bytes of the prompt's pages in host memory, in order."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        copies = self.kv.take_copies(self.step + 1)
        pages = [page for load in copies.loads for page in load.host_pages] if copies else []
        return b"".join(self.host_views(pages))


@contextlib.asynccontextmanager
async def two_sides(
    folder: Path, other: bytes = b"model", num_host_pages: int = 20
) -> AsyncIterator[tuple[Side, Side]]:
    sides = (
        Side(folder, "prefill.sock", b"model", 20),
        Side(folder, "decode.sock", other, num_host_pages),
    )
    yield sides
    for side in sides:
        side.transfers.close()
        side.kv.audit(side.step + 1)


async def wait_until_sent(side: Side) -> None:
    while side.kv.num_host:  # noqa: ASYNC110 - another thread ends it
        await asyncio.sleep(0.001)


async def test_an_offer_is_fetched_once_and_frees_its_pages(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        assert prefill.kv.num_host == NUM_PAGES
        assert await decode.transfers.fetch(prefill.path, decode.prefix())
        await wait_until_sent(prefill)
        assert decode.held() == expected
        sent, received = prefill.transfers.stats.sent, decode.transfers.stats.received
        assert sent.num_bytes == received.num_bytes == NUM_PAGES * PAGE_BYTES
        assert sent.num_transfers == received.num_transfers == 1 and received.seconds > 0
        # What is there is not asked for again.
        assert await decode.transfers.fetch("/nowhere", decode.prefix())
        assert decode.transfers.stats.num_failed == 0


async def test_only_what_is_missing_travels_and_namespaces_stay_apart(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        decode.compute(TOKENS[:13])
        for _ in range(2):
            assert await prefill.transfers.offer(prefill.prefix())
        assert not await decode.transfers.fetch(prefill.path, decode.prefix(namespace=b"salt"))
        assert await decode.transfers.fetch(prefill.path, decode.prefix())
        assert decode.transfers.stats.received.num_bytes == (NUM_PAGES - 3) * PAGE_BYTES
        assert not await prefill.transfers.offer(prefill.prefix(namespace=b"salt"))


@pytest.mark.parametrize(
    ("other", "num_host_pages", "reason"),
    [
        (b"fine-tune", 20, "another model, KV dtype or page size"),
        (b"model", NUM_PAGES - 1, "host memory has no room for it"),
    ],
)
async def test_a_fetch_that_cannot_be_is_counted_and_leaves_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    other: bytes,
    num_host_pages: int,
    reason: str,
) -> None:
    async with two_sides(tmp_path, other, num_host_pages) as (prefill, decode):
        prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        assert not await decode.transfers.fetch(prefill.path, decode.prefix())
        assert decode.transfers.stats.num_failed == 1 and decode.kv.num_host == 0
        assert reason in caplog.text


async def test_offers_that_nobody_fetches_or_that_fail_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "OFFER_S", 0.0)
    async with two_sides(tmp_path) as (prefill, decode):
        assert not await prefill.transfers.offer(prefill.prefix()), "nothing was computed"
        prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        await wait_until_sent(prefill)
        assert not await decode.transfers.fetch(prefill.path, decode.prefix())
        prefill.fails = True
        assert not await prefill.transfers.offer(prefill.prefix())
        assert prefill.kv.num_host == 0


async def test_a_request_that_leaves_takes_its_offer_along_but_not_a_running_transfer(
    tmp_path: Path,
) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        offering = asyncio.ensure_future(prefill.transfers.offer(prefill.prefix()))
        await asyncio.sleep(0)
        offering.cancel()
        await wait_until_sent(prefill)
        assert await prefill.transfers.offer(prefill.prefix())
        fetching = asyncio.ensure_future(decode.transfers.fetch(prefill.path, decode.prefix()))
        await asyncio.sleep(0)
        fetching.cancel()
        await wait_until_sent(prefill)
        while not decode.transfers.stats.received.num_transfers:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert decode.kv.match(pack_tokens(TOKENS), len(TOKENS)) == NUM_PAGES * PAGE
