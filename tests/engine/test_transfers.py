"""Prefixes handed from one engine to another: offers, fetches, and what may go wrong with both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from minisgl.engine import transfers
from minisgl.engine.transfers import Prefix, Sharing, Transfers
from minisgl.errors import EngineStoppedError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.store import Done, Transfer
from minisgl.runner import page_exchange
from minisgl.runner.page_exchange import PageExchange
from minisgl.runner.page_wire import Address
from minisgl.runner.parallel import transfers as runner_transfers

PAGE, PAGE_BYTES = 4, 1000
TOKENS = [*range(30)]  # seven pages can be cached
NUM_PAGES, NUM_RANKS = 7, 2


class Side:
    """An engine as far as transfers go: a KV cache, the host memory of two ranks, and steps without
    a model."""

    def __init__(self, folder: Path, name: str, fingerprint: bytes, num_host_pages: int) -> None:
        self.kv = KVCacheManager(
            num_pages=40, page_size=PAGE, cache_type="radix", num_host_pages=num_host_pages
        )
        self.memory = [bytearray(num_host_pages * PAGE_BYTES) for _ in range(NUM_RANKS)]
        self.gates = [threading.Event() for _ in range(NUM_RANKS)]
        for gate in self.gates:
            gate.set()
        self.step = 0
        self.fails = False
        self.is_lost = False  # a rank
        place = Address(path=str(folder / name))
        self.exchanges = [
            PageExchange(place.of_rank(rank), b"", rank, partial(self.views, rank), lambda: None)
            for rank in range(NUM_RANKS)
        ]
        self.ranks = runner_transfers.Transfers(NUM_RANKS)
        addresses = tuple(str(exchange.address) for exchange in self.exchanges)
        sharing = Sharing(place, b"", addresses, fingerprint, NUM_RANKS * PAGE_BYTES)
        self.transfers = Transfers(self.kv, sharing, self.transfer, self.launch)
        self.address = self.transfers.address

    def views(self, rank: int, host_pages: Sequence[int]) -> list[memoryview]:
        assert self.gates[rank].wait(20)
        memory = memoryview(self.memory[rank])
        return [memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in host_pages]

    def transfer(self, transfers: Sequence[Transfer], done: Done) -> None:
        if self.is_lost:
            raise EngineStoppedError("A rank cannot be reached.")
        self.ranks.begin(transfers, done)
        for exchange in self.exchanges:
            for each in transfers:
                exchange.queue(each, [], self.ranks.ended)

    def launch(self) -> None:
        """Run a step that copies device page N as bytes of value N, and more of rank 1."""
        self.step += 1
        copies = self.kv.take_copies(self.step)
        if self.fails:
            self.kv.drop_written_since(self.step)
        elif copies is not None:
            for page, host_page in copies.offloads:
                for rank in range(NUM_RANKS):
                    (view,) = self.views(rank, [host_page])
                    view[:] = bytes([100 * rank + page]) * PAGE_BYTES
        asyncio.get_running_loop().call_soon(self.transfers.step_ended, self.step)

    def compute(self, tokens: Sequence[int]) -> bytes:
        """Leave a prompt in the cache; returns what its host pages will hold."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        pages = lease.pages[: (len(tokens) - 1) // PAGE]
        self.kv.close(lease, pack_tokens(tokens), len(tokens), self.step)
        return b"".join(
            bytes([100 * rank + page]) * PAGE_BYTES for rank in range(NUM_RANKS) for page in pages
        )

    def prefix(self, tokens: Sequence[int] = TOKENS, namespace: bytes = b"") -> Prefix:
        return self.transfers.prefix(tokens, namespace)

    def held(self, tokens: Sequence[int] = TOKENS) -> bytes:
        """The bytes of the prompt's pages in host memory, in order, rank after rank."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        copies = self.kv.take_copies(self.step + 1)
        pages = [page for load in copies.loads for page in load.host_pages] if copies else []
        return b"".join(view for rank in range(NUM_RANKS) for view in self.views(rank, pages))

    def close(self) -> None:
        self.transfers.close()
        for exchange in self.exchanges:
            exchange.close()


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
        side.close()
        side.kv.audit(side.step + 1)


async def wait_until_sent(side: Side) -> None:
    while side.kv.num_host:  # noqa: ASYNC110 - another thread ends it
        await asyncio.sleep(0.001)


async def test_an_offer_is_fetched_once_and_frees_its_pages(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        assert prefill.kv.num_host == NUM_PAGES
        assert await decode.transfers.fetch(prefill.address, decode.prefix())
        await wait_until_sent(prefill)
        assert decode.held() == expected
        sent, received = prefill.transfers.stats.sent, decode.transfers.stats.received
        assert sent.num_bytes == received.num_bytes == NUM_PAGES * NUM_RANKS * PAGE_BYTES
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
        assert not await decode.transfers.fetch(prefill.address, decode.prefix(namespace=b"salt"))
        assert await decode.transfers.fetch(prefill.address, decode.prefix())
        assert decode.transfers.stats.received.num_bytes == (NUM_PAGES - 3) * NUM_RANKS * PAGE_BYTES
        assert not await prefill.transfers.offer(prefill.prefix(namespace=b"salt"))


@pytest.mark.parametrize(
    ("other", "num_host_pages", "reason"),
    [
        (b"fine-tune", 20, "another model, --tp, KV dtype or page size"),
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
        assert not await decode.transfers.fetch(prefill.address, decode.prefix())
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
        assert not await decode.transfers.fetch(prefill.address, decode.prefix())
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
        fetching = asyncio.ensure_future(decode.transfers.fetch(prefill.address, decode.prefix()))
        await asyncio.sleep(0)
        fetching.cancel()
        await wait_until_sent(prefill)
        while not decode.transfers.stats.received.num_transfers:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert decode.kv.match(pack_tokens(TOKENS), len(TOKENS)) == NUM_PAGES * PAGE


def lose_rank_before(sender: Side, receiver: Side) -> None:
    """Rank 1 of the sender has died, and its address with it."""
    sender.exchanges[1].close()


def lose_rank_meanwhile(sender: Side, receiver: Side) -> None:
    """Rank 1 of the sender fails on its way."""
    sender.exchanges[1]._views = lambda pages: [*sender.views(1, pages[:3]), memoryview(bytes(5))]


def lose_sender(sender: Side, receiver: Side) -> None:
    sender.close()


def lose_sending_ranks(sender: Side, receiver: Side) -> None:
    sender.is_lost = True


def lose_receiving_ranks(sender: Side, receiver: Side) -> None:
    receiver.is_lost = True


def lose_pages(sender: Side, receiver: Side) -> None:
    """Rank 0 of the receiver cannot write to its pages."""
    receiver.exchanges[0]._views = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("lose", "num_pages", "reason"),
    [
        (lose_rank_before, 0, "0 of 7 pages have come: a rank of the other"),
        (lose_rank_meanwhile, 3, "3 of 7 pages have come: a rank of the other engine has ended"),
        (lose_sender, 0, "FileNotFoundError"),
        (lose_sending_ranks, 0, "A rank cannot be reached"),
        (lose_receiving_ranks, 0, "A rank cannot be reached"),
        (lose_pages, 0, "0 of 7 pages have come"),
    ],
)
async def test_pages_that_one_rank_lacks_are_computed_and_nothing_leaks(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Side, Side], None],
    num_pages: int,
    reason: str,
) -> None:
    if not num_pages:  # offers are in vain, and otherwise nobody is to give up
        monkeypatch.setattr(page_exchange, "SILENCE_S", 0.2)
    async with two_sides(tmp_path) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        lose(prefill, decode)
        assert await decode.transfers.fetch(prefill.address, decode.prefix()) == bool(num_pages)
        assert decode.kv.num_host == num_pages
        assert decode.transfers.stats.num_failed == 1
        (line,) = [line for line in caplog.messages if line.startswith("A prefix is computed here")]
        assert reason in line
        if lose is not lose_sender:  # whose pages nobody needs any more
            await wait_until_sent(prefill)
        ranks = [expected[i * NUM_PAGES * PAGE_BYTES :] for i in range(NUM_RANKS)]
        assert decode.held() == b"".join(part[: num_pages * PAGE_BYTES] for part in ranks)


async def test_pages_are_neither_read_nor_free_before_the_slowest_rank_is_done(
    tmp_path: Path,
) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        for gate in (prefill.gates[1], decode.gates[1]):
            gate.clear()
        fetching = asyncio.ensure_future(decode.transfers.fetch(prefill.address, decode.prefix()))
        part = expected[: NUM_PAGES * PAGE_BYTES]  # of rank 0
        while not decode.memory[0].startswith(part):  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.001)
        for side in (prefill, decode):
            assert side.kv.num_host == NUM_PAGES
        assert not fetching.done() and not decode.kv.match(pack_tokens(TOKENS), len(TOKENS))
        decode.gates[1].set()
        prefill.gates[1].set()
        assert await fetching
        await wait_until_sent(prefill)
        assert decode.held() == expected


async def test_an_engine_that_is_closed_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        assert await prefill.transfers.offer(prefill.prefix())
        prefill.launch = lambda: None  # type: ignore[method-assign]
        prefill.transfers._launch = prefill.launch
        offering = asyncio.ensure_future(prefill.transfers.offer(prefill.prefix()))
        decode.gates[0].clear()
        fetching = asyncio.ensure_future(decode.transfers.fetch(prefill.address, decode.prefix()))
        while not decode.transfers._under_way:  # noqa: ASYNC110 - another engine answers first
            await asyncio.sleep(0.001)
        decode.close()
        prefill.close()
        assert not await fetching and not await offering
        assert not await prefill.transfers.offer(prefill.prefix())
        assert not await decode.transfers.fetch(prefill.address, decode.prefix())
        decode.gates[0].set()
