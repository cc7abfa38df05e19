"""Prefixes handed from one engine to another: offers, fetches, and what may go wrong with both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import LIMIT_S

from minisgl.distributed.addresses import Address, Listening
from minisgl.engine import prefix_exchange
from minisgl.engine.page_moves import PageMoves
from minisgl.engine.prefix_exchange import OwnSide, PrefixExchange
from minisgl.errors import EngineStoppedError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Done, Move, Place
from minisgl.kvcache.prefix import pack_tokens
from minisgl.ranks.processes.fewest_pages import FewestPages
from minisgl.tiers.carriers.carrier import Readable
from minisgl.tiers.carriers.socket_pages import SocketPages
from minisgl.tiers.peers import page_exchange
from minisgl.tiers.peers.page_exchange import PageExchange

PAGE, PAGE_BYTES = 4, 1000
TOKENS = [*range(30)]  # seven pages can be cached
NUM_PAGES, NUM_RANKS = 7, 2


class Side:
    """An engine as far as transfers go: a KV cache, the memory of two ranks, and steps without a
    model."""

    def __init__(
        self,
        folder: Path,
        name: str,
        fingerprint: bytes,
        num_host_pages: int,
        crossing: dict[bytes, tuple[Side, Move]] | None,
    ) -> None:
        """crossing: what is sent from device to device, by name; None: nothing can be."""
        self.kv = KVCacheManager(
            num_pages=40,
            page_size=PAGE,
            cache_type="radix",
            num_host_pages=num_host_pages,
            max_in_transit=0 if crossing is None else NUM_PAGES,
        )
        self.crossing = crossing
        self.is_mapped = True  # what is on the device of the other engine
        self.device = [bytearray(40 * PAGE_BYTES) for _ in range(NUM_RANKS)]
        self.memory = [bytearray(num_host_pages * PAGE_BYTES) for _ in range(NUM_RANKS)]
        self.gates = [threading.Event() for _ in range(NUM_RANKS)]
        for gate in self.gates:
            gate.set()
        self.step = 0
        self.fails = False
        self.is_lost = False  # a rank
        place = Address(path=str(folder / name))
        self.exchanges = [
            PageExchange(
                place.of_rank(rank),
                b"",
                rank,
                PAGE_BYTES,
                partial(self.views, rank),
                lambda: None,
                [SocketPages()],
            )
            for rank in range(NUM_RANKS)
        ]
        self.ranks = FewestPages(NUM_RANKS)
        addresses = tuple(str(exchange.address) for exchange in self.exchanges)
        listening = Listening(addresses, is_direct=crossing is not None)
        own = OwnSide(place, b"", listening, fingerprint, NUM_RANKS * PAGE_BYTES)
        loaded = SimpleNamespace(
            config=SimpleNamespace(num_host_pages=0),
            model=None,
            runner=self,
            fingerprint=fingerprint,
            disk=None,
        )
        self.moves = PageMoves(loaded, SimpleNamespace(kv=self.kv), lambda: None)  # type: ignore[arg-type]
        self.exchange = PrefixExchange(self.kv, own, self.moves.start, self.launch)
        self.moves._exchange = self.exchange
        self.address = self.exchange.address

    def views(self, rank: int, host_pages: Sequence[int]) -> list[memoryview]:
        assert self.gates[rank].wait(LIMIT_S)
        memory = memoryview(self.memory[rank])
        return [memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in host_pages]

    def move(self, moves: Sequence[Move], done: Done) -> None:
        if self.is_lost:
            raise EngineStoppedError("A rank cannot be reached.")
        self.ranks.expect(moves, done)
        for each in moves:
            if each.uses_device:
                self.cross(each)
                continue
            for exchange in self.exchanges:
                exchange.start(each, [], self.ranks.ended)

    def cross(self, move: Move) -> None:
        """Copy pages from device to device, when both sides have begun."""
        assert self.crossing is not None
        if move.target is Place.ENGINE:
            self.crossing[move.name] = (self, move)
            return
        sender, sent = self.crossing.pop(move.name)
        for mine, other in zip(self.device, sender.device, strict=True):
            for page, source in zip(move.pages, sent.pages, strict=False):
                if self.is_mapped:
                    mine[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = sender.page(other, source)
        for side, each in ((sender, sent), (self, move)):
            for _ in range(NUM_RANKS):
                side.ranks.ended(each.id, len(move.pages) if self.is_mapped else 0)

    @staticmethod
    def page(memory: bytearray, page: int) -> bytes:
        return bytes(memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def launch(self) -> None:
        """Run a step that makes the copies."""
        self.step += 1
        copies = self.kv.tiers.take_copies(self.step)
        if self.fails:
            self.kv.drop_written_since(self.step)
        elif copies is not None:
            for page, host_page in copies.offloads:
                for rank in range(NUM_RANKS):
                    (view,) = self.views(rank, [host_page])
                    view[:] = self.page(self.device[rank], page)
        asyncio.get_running_loop().call_soon(self.kv.settled, self.step)

    def compute(self, tokens: Sequence[int]) -> bytes:
        """Leave a prompt in the cache, device page N with bytes N, and more on rank 1; returns what
        its pages hold, rank after rank."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        pages = lease.pages[: (len(tokens) - 1) // PAGE]
        self.kv.close(lease, pack_tokens(tokens), len(tokens), self.step)
        for rank, memory in enumerate(self.device):
            for page in pages:
                memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = (
                    bytes([100 * rank + page]) * PAGE_BYTES
                )
        return b"".join(self.page(memory, page) for memory in self.device for page in pages)

    def prefix(
        self, tokens: Sequence[int] = TOKENS, namespace: bytes = b""
    ) -> tuple[Sequence[int], bytes]:
        return tokens, namespace

    def held(self, tokens: Sequence[int] = TOKENS) -> bytes:
        """The bytes of the prompt's pages in host memory, in order, rank after rank."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        assert self.kv.reserve(lease, len(tokens)) is not None
        copies = self.kv.tiers.take_copies(self.step + 1)
        pages = [page for load in copies.loads for page in load.host_pages] if copies else []
        return b"".join(view for rank in range(NUM_RANKS) for view in self.views(rank, pages))

    def on_device(self, tokens: Sequence[int] = TOKENS) -> bytes:
        """The bytes of the prompt's pages on the device, in order, rank after rank."""
        lease = self.kv.acquire(pack_tokens(tokens), len(tokens))
        pages = lease.pages
        self.kv.close(lease)
        return b"".join(self.page(memory, page) for memory in self.device for page in pages)

    def close(self) -> None:
        self.moves.close()
        for exchange in self.exchanges:
            exchange.close()


@contextlib.asynccontextmanager
async def two_sides(
    folder: Path,
    other: bytes = b"model",
    num_host_pages: int = 20,
    is_direct: tuple[bool, bool] = (False, False),
) -> AsyncIterator[tuple[Side, Side]]:
    crossing: list[dict[bytes, tuple[Side, Move]] | None] = [
        {} if each else None for each in is_direct
    ]
    if all(is_direct):
        crossing[1] = crossing[0]
    sides = (
        Side(folder, "prefill.sock", b"model", 20, crossing[0]),
        Side(folder, "decode.sock", other, num_host_pages, crossing[1]),
    )
    yield sides
    for side in sides:
        side.close()
        side.kv.audit(side.step + 1)


async def wait_until_sent(side: Side) -> None:
    while side.kv.tiers.host.pool.num_used:  # noqa: ASYNC110 - another thread ends it
        await asyncio.sleep(0.001)


async def test_an_offer_is_fetched_once_and_frees_its_pages(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        assert await prefill.exchange.offer(*prefill.prefix())
        assert prefill.kv.tiers.host.pool.num_used == NUM_PAGES
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        await wait_until_sent(prefill)
        assert decode.held() == expected
        sent, received = prefill.exchange.stats.sent, decode.exchange.stats.received
        assert sent.num_bytes == received.num_bytes == NUM_PAGES * NUM_RANKS * PAGE_BYTES
        assert sent.num_transfers == received.num_transfers == 1 and received.seconds > 0
        # What is there is not asked for again.
        assert await decode.exchange.fetch("/nowhere", *decode.prefix())
        assert decode.exchange.stats.num_failed == 0


@pytest.mark.parametrize("is_direct", [False, True])
async def test_an_offer_of_what_is_there_frees_its_pages_at_once(
    tmp_path: Path, is_direct: bool
) -> None:
    async with two_sides(tmp_path, is_direct=(is_direct, is_direct)) as (prefill, decode):
        for side in (prefill, decode):
            side.compute(TOKENS)
        assert await prefill.exchange.offer(*prefill.prefix())
        assert prefill.kv.num_available == 39 - is_direct * NUM_PAGES
        assert prefill.kv.tiers.host.pool.num_used == (not is_direct) * NUM_PAGES
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        while prefill.kv.num_available < 39:  # noqa: ASYNC110 - another thread ends it
            await asyncio.sleep(0.001)
        await wait_until_sent(prefill)
        for stats in (prefill.exchange.stats, decode.exchange.stats):
            assert stats.sent.num_transfers == stats.received.num_transfers == 0
            assert stats.num_failed == 0


async def test_only_what_is_missing_travels_and_namespaces_stay_apart(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        decode.compute(TOKENS[:13])
        for _ in range(2):
            assert await prefill.exchange.offer(*prefill.prefix())
        assert not await decode.exchange.fetch(prefill.address, *decode.prefix(namespace=b"salt"))
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        assert decode.exchange.stats.received.num_bytes == (NUM_PAGES - 3) * NUM_RANKS * PAGE_BYTES
        assert not await prefill.exchange.offer(*prefill.prefix(namespace=b"salt"))


@pytest.mark.parametrize(
    ("other", "num_host_pages", "reason"),
    [
        (b"fine-tune", 20, "another model, --tp, --dp-attention, KV dtype, page size"),
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
        assert await prefill.exchange.offer(*prefill.prefix())
        assert not await decode.exchange.fetch(prefill.address, *decode.prefix())
        assert decode.exchange.stats.num_failed == 1 and decode.kv.tiers.host.pool.num_used == 0
        assert reason in caplog.text


async def test_offers_that_nobody_fetches_or_that_fail_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_exchange, "OFFER_S", 0.0)
    async with two_sides(tmp_path) as (prefill, decode):
        assert not await prefill.exchange.offer(*prefill.prefix()), "nothing was computed"
        prefill.compute(TOKENS)
        assert await prefill.exchange.offer(*prefill.prefix())
        await wait_until_sent(prefill)
        assert not await decode.exchange.fetch(prefill.address, *decode.prefix())
        prefill.fails = True
        assert not await prefill.exchange.offer(*prefill.prefix())
        assert prefill.kv.tiers.host.pool.num_used == 0


async def test_a_request_that_leaves_takes_its_offer_along_but_not_a_running_transfer(
    tmp_path: Path,
) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        offering = asyncio.ensure_future(prefill.exchange.offer(*prefill.prefix()))
        await asyncio.sleep(0)
        offering.cancel()
        await wait_until_sent(prefill)
        assert await prefill.exchange.offer(*prefill.prefix())
        fetching = asyncio.ensure_future(decode.exchange.fetch(prefill.address, *decode.prefix()))
        await asyncio.sleep(0)
        fetching.cancel()
        await wait_until_sent(prefill)
        while not decode.exchange.stats.received.num_transfers:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        assert decode.kv.match(pack_tokens(TOKENS), len(TOKENS)) == NUM_PAGES * PAGE


class FailingPages(SocketPages):
    """Brings one page at a time, and fails after four of them."""

    num_parts = 0

    def part_size(self, page_bytes: int) -> int:
        return 1

    def put(self, slot: int, pages: Sequence[memoryview]) -> Readable:
        self.num_parts += 1
        if self.num_parts > 4:
            raise RuntimeError("the rank is lost")
        return super().put(slot, pages)


def lose_rank_before(sender: Side, receiver: Side) -> None:
    """Rank 1 of the sender has died, and its address with it."""
    sender.exchanges[1].close()


def lose_rank_meanwhile(sender: Side, receiver: Side) -> None:
    """Rank 1 of the sender fails on its way: it does not confirm the fourth page."""
    sender.exchanges[1]._host_carriers = [FailingPages()]


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
        assert await prefill.exchange.offer(*prefill.prefix())
        lose(prefill, decode)
        assert await decode.exchange.fetch(prefill.address, *decode.prefix()) == bool(num_pages)
        assert decode.kv.tiers.host.pool.num_used == num_pages
        assert decode.exchange.stats.num_failed == 1
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
        assert await prefill.exchange.offer(*prefill.prefix())
        for gate in (prefill.gates[1], decode.gates[1]):
            gate.clear()
        fetching = asyncio.ensure_future(decode.exchange.fetch(prefill.address, *decode.prefix()))
        part = expected[: NUM_PAGES * PAGE_BYTES]  # of rank 0
        while not decode.memory[0].startswith(part):  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.001)
        for side in (prefill, decode):
            assert side.kv.tiers.host.pool.num_used == NUM_PAGES
        assert not fetching.done() and not decode.kv.match(pack_tokens(TOKENS), len(TOKENS))
        decode.gates[1].set()
        prefill.gates[1].set()
        assert await fetching
        await wait_until_sent(prefill)
        assert decode.held() == expected


async def test_pages_go_from_device_to_device_and_stay_as_they_are_until_then(
    tmp_path: Path,
) -> None:
    async with two_sides(tmp_path, is_direct=(True, True)) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        decode.compute([*range(100, 109)])  # so that other pages are free there
        free = prefill.kv.num_available
        assert await prefill.exchange.offer(*prefill.prefix())
        assert prefill.kv.num_available == free - NUM_PAGES and prefill.step == 0
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        assert decode.on_device() == expected
        await asyncio.sleep(0)
        assert prefill.kv.num_available == free
        assert prefill.kv.tiers.host.pool.num_used == decode.kv.tiers.host.pool.num_used == 0
        for totals in (prefill.exchange.stats.sent, decode.exchange.stats.received):
            assert totals.num_direct == totals.num_transfers == 1
            assert totals.num_bytes == NUM_PAGES * NUM_RANKS * PAGE_BYTES


def fill_device(sender: Side, receiver: Side) -> None:
    """The receiver has no room that needs no plan."""
    receiver.compute([*range(1000, 1000 + 38 * PAGE)])


def lend_to_another(sender: Side, receiver: Side) -> None:
    """The sender lends as much as it may."""
    sender.compute([*range(1000, 1000 + 2 * PAGE)])
    assert (
        sender.kv.tiers.transits.lend(pack_tokens([*range(1000, 1000 + 2 * PAGE)]), 2 * PAGE)
        is not None
    )


def do_nothing(sender: Side, receiver: Side) -> None:
    pass


@pytest.mark.parametrize(
    ("is_direct", "prepare"),
    [
        ((True, False), do_nothing),
        ((False, True), do_nothing),
        ((True, True), fill_device),
        ((True, True), lend_to_another),
    ],
    ids=["only the sender can", "only the receiver can", "no room", "too much is lent"],
)
async def test_pages_that_cannot_go_from_device_to_device_go_through_host_memory(
    tmp_path: Path, is_direct: tuple[bool, bool], prepare: Callable[[Side, Side], None]
) -> None:
    async with two_sides(tmp_path, is_direct=is_direct) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        prepare(prefill, decode)
        assert await prefill.exchange.offer(*prefill.prefix())
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        await wait_until_sent(prefill)
        assert decode.held() == expected
        assert decode.exchange.stats.received.num_direct == 0


async def test_an_engine_whose_device_cannot_be_mapped_is_asked_for_host_pages_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_sides(tmp_path, is_direct=(True, True)) as (prefill, decode):
        expected = prefill.compute(TOKENS)
        decode.is_mapped = False
        assert await prefill.exchange.offer(*prefill.prefix())
        assert not await decode.exchange.fetch(prefill.address, *decode.prefix())
        assert "what is on its device cannot be mapped" in caplog.text
        assert decode.kv.num_free == 39
        assert await prefill.exchange.offer(*prefill.prefix())
        assert await decode.exchange.fetch(prefill.address, *decode.prefix())
        await wait_until_sent(prefill)
        assert decode.held() == expected


async def test_what_is_lent_and_not_fetched_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_sides(tmp_path, is_direct=(True, True)) as (prefill, decode):
        prefill.compute(TOKENS)
        monkeypatch.setattr(prefix_exchange, "OFFER_S", 0.0)
        assert await prefill.exchange.offer(*prefill.prefix())
        while prefill.kv.num_available < 39:  # noqa: ASYNC110 - a timer ends it
            await asyncio.sleep(0.001)
        monkeypatch.setattr(prefix_exchange, "OFFER_S", 60.0)
        for side in (prefill, decode):
            assert await prefill.exchange.offer(*prefill.prefix())
            side.is_lost = True
            assert not await decode.exchange.fetch(prefill.address, *decode.prefix())
            assert decode.kv.num_available == 39
            assert prefill.kv.num_available == (39 if side is prefill else 39 - NUM_PAGES)
            side.is_lost = False


async def test_an_engine_that_is_closed_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with two_sides(tmp_path) as (prefill, decode):
        prefill.compute(TOKENS)
        assert await prefill.exchange.offer(*prefill.prefix())
        prefill.launch = lambda: None  # type: ignore[method-assign]
        prefill.exchange._launch = prefill.launch
        offering = asyncio.ensure_future(prefill.exchange.offer(*prefill.prefix()))
        decode.gates[0].clear()
        fetching = asyncio.ensure_future(decode.exchange.fetch(prefill.address, *decode.prefix()))
        while not decode.kv.moves.under_way:  # noqa: ASYNC110 - another engine answers first
            await asyncio.sleep(0.001)
        decode.close()
        prefill.close()
        assert not await fetching and not await offering
        assert not await prefill.exchange.offer(*prefill.prefix())
        assert not await decode.exchange.fetch(prefill.address, *decode.prefix())
        decode.gates[0].set()
