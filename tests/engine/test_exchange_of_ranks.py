"""Prefixes handed from one engine to another whose ranks divide requests: each is on one rank of
either engine, which need not be the same. Moves copy between tables of what each page holds."""

from __future__ import annotations

import array
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_memory import ALONE, KINDS, PAGE, SPARED, STATES, Engine, Held

from minisgl.distributed.addresses import Address, Listening
from minisgl.engine.prefix_exchange import OwnSide, PrefixExchange
from minisgl.kvcache.moves import Move, Moves, Place
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.rank_caches import RankCaches

NUM_RANKS = 2
# Of a stage, by the address of a rank and the name of the move: whose memory, and which pages.
Sent = dict[tuple[str, bytes], tuple["Side", Move]]


class Side:
    """An engine of `num_stages` times NUM_RANKS ranks, each with the pages of its own requests."""

    def __init__(
        self, folder: Path, name: str, kind: str, num_stages: int, sent: Sent, num_pages: int
    ) -> None:
        """sent: what the engines send each other."""
        moves, is_direct = Moves(), kind == ALONE
        most = num_pages // 2 if is_direct else 0
        self.ranks = [
            Engine(kind, num_pages, rank=rank, moves=moves, max_in_transit=most)
            for rank in range(NUM_RANKS)
        ]
        self.kv = RankCaches([rank.kv for rank in self.ranks], num_slots=2)
        self.addresses = [f"{name} {number}" for number in range(num_stages * NUM_RANKS)]
        listening = Listening(tuple(self.addresses), is_direct=is_direct)
        own = OwnSide(Address(path=str(folder / name)), b"", listening, b"model", 1)
        self.exchange = PrefixExchange(self.kv, own, self.start, self.launch)
        self.sent = sent

    def launch(self) -> None:
        for rank in self.ranks:
            rank.copy()

    def start(self) -> None:
        for move in self.kv.moves.take():
            # The numbers of the ranks that it is for, one of each stage.
            of_stages = range(move.rank, len(self.addresses), NUM_RANKS)
            if move.target is Place.ENGINE:
                self.sent.update(
                    ((self.addresses[at], move.name), (self, move)) for at in of_stages
                )
                continue
            [(other, source)] = {self.sent.pop((move.peers[at], move.name)) for at in of_stages}
            sent = [other.memory(source)[page] for page in source.pages]
            self.memory(move).update(zip(move.pages, sent, strict=False))
            asyncio.get_running_loop().call_soon(other.kv.moves.end, source.id, len(move.pages))
            asyncio.get_running_loop().call_soon(self.kv.moves.end, move.id, len(move.pages))

    def memory(self, move: Move) -> dict[int, Held]:
        rank = self.ranks[move.rank]
        return rank.device if move.uses_device else rank.host

    def run(self, tokens: list[int]) -> tuple[int, int | None]:
        """Compute a prompt; returns the rank, and how many tokens were found."""
        rank = self.kv.best_for(pack_tokens(tokens), len(tokens)).rank
        return rank, self.ranks[rank].run(tokens)

    def check(self) -> None:
        """Each page holds what its tokens say."""
        self.launch()
        for rank in self.ranks:
            rank.kv.audit(rank.step)
            tree = rank.kv._cache.tree
            memories = (rank.device, rank.kv._cache.pages), (rank.host, rank.kv.tiers.host.pages)
            for node in tree.nodes():
                _, key, start = tree.place(node)
                tokens = array.array("i", key)
                for memory, pages in memories:
                    for end, page in enumerate(pages.get(node, ()), start + 1):
                        assert memory[page] == ("page", tuple(tokens[: end * PAGE]), 0)


@contextlib.asynccontextmanager
async def two_sides(
    folder: Path, kind: str, *, num_stages: int = 1, num_pages: int = 60
) -> AsyncIterator[tuple[Side, Side]]:
    sent: Sent = {}
    sides = [Side(folder, name, kind, num_stages, sent, num_pages) for name in ("a", "b")]
    try:
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.exchange.close()


async def fetch(decode: Side, prefill: Side, tokens: list[int]) -> bool:
    return await decode.exchange.fetch(prefill.exchange.address, tokens, b"")


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kind", [ALONE, *KINDS])
async def test_a_prefix_goes_from_the_rank_that_has_it_to_the_one_that_is_best(
    kind: str, num_stages: int, tmp_path: Path
) -> None:
    async with two_sides(tmp_path, kind, num_stages=num_stages) as (prefill, decode):
        prompts = [[*range(first, first + 21)] for first in (0, 100)]
        assert [prefill.run(each) for each in prompts] == [(0, 0), (1, 0)]
        for rank, prompt in ((0, prompts[1]), (1, prompts[0])):
            assert await prefill.exchange.offer(prompt, b"")
            assert await fetch(decode, prefill, prompt)
            assert decode.run(prompt) == (rank, 20)
            for side in (prefill, decode):
                side.check()
        received = decode.exchange.stats.received
        assert received.num_transfers == 2 and received.num_direct == (2 if kind == ALONE else 0)
        assert received.num_bytes == prefill.exchange.stats.sent.num_bytes >= 2 * 10
        assert decode.exchange.stats.num_failed == 0
        assert not any(rank.kv.tiers.host.pool.num_used for rank in prefill.ranks)


@pytest.mark.parametrize("kind", [ALONE, STATES])
async def test_a_rank_that_has_the_end_in_host_memory_alone_leaves_the_offer_to_another(
    kind: str, tmp_path: Path
) -> None:
    async with two_sides(tmp_path, kind) as (prefill, decode):
        prompt = [*range(21)]
        assert prefill.run(prompt) == (0, 0)
        prefill.ranks[0].kv.tiers.offload_all()
        prefill.launch()
        if kind == STATES:  # of which only the snapshot is in host memory
            assert prefill.run(prompt) == (0, 20)
            prefill.ranks[0].lose_snapshot(prompt, 10)
        assert prefill.ranks[1].run(prompt) == 0
        assert await prefill.exchange.offer(prompt, b"")
        assert await fetch(decode, prefill, prompt)
        assert decode.run(prompt) == (0, 20)


async def test_a_prefix_is_fetched_while_all_slots_are_taken(tmp_path: Path) -> None:
    async with two_sides(tmp_path, ALONE) as (prefill, decode):
        prompt = [*range(21)]
        assert prefill.run(prompt) == (0, 0)
        leases = [cache.acquire(b"", 0) for cache in decode.kv.of_ranks for _ in range(2)]
        assert await prefill.exchange.offer(prompt, b"")
        assert await fetch(decode, prefill, prompt)
        for lease in leases:
            decode.kv.of(lease).close(lease)
        assert decode.run(prompt) == (0, 20)


async def test_an_offer_of_another_number_of_ranks_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_sides(tmp_path, ALONE) as (prefill, decode):
        prompt = [*range(21)]
        prefill.run(prompt)
        assert await prefill.exchange.offer(prompt, b"")
        prefill.kv.of_ranks = prefill.kv.of_ranks[:1]  # as if all ranks had parts of each page
        assert not await fetch(decode, prefill, prompt)
        assert "the other engine has another number of ranks" in caplog.text
        decode.check()


PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=24)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 1), PROMPTS),
    st.tuples(st.just("leave"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("lose"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("offer"), st.integers(0, 1), PROMPTS),
    st.tuples(st.just("fetch"), st.integers(0, 1), PROMPTS),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([ALONE, *KINDS, SPARED]), st.integers(1, 2), st.lists(ACTIONS, max_size=20))
def test_any_exchange_of_ranks_leaves_each_page_right_and_with_one_owner(
    kind: str, num_stages: int, actions: list[tuple[str, int, list[int]]]
) -> None:
    async def run(folder: Path) -> None:
        async with two_sides(folder, kind, num_stages=num_stages, num_pages=30) as sides:
            offered: list[list[int]] = []
            for action, which, tokens in actions:
                side, rank = sides[which % 2], which // 2
                if action == "run":
                    side.run(tokens)
                elif action == "leave":
                    side.ranks[rank].kv.tiers.offload_all()
                elif action == "lose":
                    side.ranks[rank].kv.tiers.host.make_room(110)
                elif action == "offer":
                    sides[0].run(tokens)
                    if await sides[0].exchange.offer(tokens, b""):
                        offered.append(tokens)
                else:  # what was offered, beside one prompt that may not be
                    wanted = [*offered, tokens]
                    offered.clear()
                    await asyncio.gather(*(fetch(sides[1], sides[0], each) for each in wanted))
                for each in sides:
                    each.check()

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
