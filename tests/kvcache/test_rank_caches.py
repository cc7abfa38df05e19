"""The caches of ranks that divide the requests, against a simple model of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Place
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.rank_caches import PREFIX_WEIGHT, RankCaches


@dataclass
class Held:
    lease: Lease
    tokens: list[int]
    namespace: bytes
    num_committed: int = 0


Prefixes = set[tuple[bytes, tuple[int, ...]]]


@dataclass
class Model:
    """Caches of ranks, and what each must have. Pages are evicted only if there are few."""

    num_ranks: int
    num_slots: int  # of each rank
    page_size: int
    num_pages: int  # of each rank
    step: int = 0
    held: list[Held] = field(default_factory=list)
    last_key: bytes = b""
    first: int = -1  # of the ranks, if all are equally good

    def __post_init__(self) -> None:
        self.kv = RankCaches(
            [
                KVCacheManager(
                    num_pages=self.num_pages,
                    page_size=self.page_size,
                    cache_type="radix",
                    rank=rank,
                )
                for rank in range(self.num_ranks)
            ],
            self.num_slots,
        )
        # Prefixes of whole pages that each rank may have, and those that it has unless it evicts:
        # what a running request computes beside another is in the cache once it ends.
        self.computed = [Prefixes() for _ in range(self.num_ranks)]
        self.left = [Prefixes() for _ in range(self.num_ranks)]

    def of(self, rank: int) -> list[Held]:
        return [held for held in self.held if held.lease.rank == rank]

    def has_slot(self, rank: int) -> bool:
        return len(self.of(rank)) < self.num_slots

    def in_use(self, rank: int) -> int:
        """Tokens in the pages of a rank's requests, which may share some."""
        pages = {page for held in self.of(rank) for page in held.lease.pages}
        return len(pages) * self.page_size

    def longest(self, known: Prefixes, tokens: list[int], namespace: bytes) -> int:
        """Of the known prefixes of a prompt, one token of which is left to compute."""
        ends = range((len(tokens) - 1) // self.page_size * self.page_size, 0, -self.page_size)
        return next((end for end in ends if (namespace, tuple(tokens[:end])) in known), 0)

    def begin(self, tokens: list[int], namespace: bytes, *, evicts: bool) -> Held | None:
        """Open a lease and reserve its pages; None if its rank has too few."""
        ranks = [rank for rank in range(self.num_ranks) if self.has_slot(rank)]
        asked, before = (pack_tokens(tokens), len(tokens), namespace), self.num_free()
        found = [cache.match(*asked) for cache in self.kv.of_ranks]
        for rank, num in enumerate(found):
            assert num <= self.longest(self.computed[rank], tokens, namespace)
            assert evicts or num >= self.longest(self.left[rank], tokens, namespace)
        in_use = [self.in_use(rank) for rank in range(self.num_ranks)]
        assert self.kv.match(*asked) == max(found)
        if asked[0] != self.last_key:
            self.last_key, self.first = asked[0], self.first + 1
        lease = self.kv.best_for(*asked).acquire(*asked)
        assert lease.rank in ranks and len(lease.pages) * self.page_size == found[lease.rank]
        for rank in ranks:
            more = in_use[lease.rank] - in_use[rank]
            worth = PREFIX_WEIGHT * (found[lease.rank] - found[rank])
            # Of equals it is that whose turn comes first.
            turns = [(each - self.first) % self.num_ranks for each in (lease.rank, rank)]
            assert more < worth or (more == worth and turns[0] <= turns[1])
        held = Held(lease, tokens, namespace)
        self.held.append(held)
        fits = self.kv.of(lease).reserve(lease, len(tokens)) is not None
        self.check(before, lease.rank)
        if fits:
            return held
        self.end(held, computed=False)
        return None

    def compute(self, held: Held, num_tokens: int) -> None:
        self.step += 1
        before = self.num_free()
        key = pack_tokens(held.tokens)
        self.kv.of(held.lease).commit(held.lease, key, num_tokens, self.step)
        held.num_committed = num_tokens
        self.computed[held.lease.rank] |= self.prefixes(held, num_tokens)
        self.check(before, held.lease.rank)

    def end(self, held: Held, *, computed: bool) -> None:
        """As a request that ends, or is retracted, which leaves what it has computed."""
        before = self.num_free()
        self.held.remove(held)
        if computed:
            num_tokens = max(held.num_committed, len(held.tokens) - 1)
            self.step += 1
            for known in (self.computed, self.left):
                known[held.lease.rank] |= self.prefixes(held, num_tokens)
            kv, key = self.kv.of(held.lease), pack_tokens(held.tokens)
            kv.close(held.lease, key, num_tokens, self.step)
        else:
            self.kv.of(held.lease).close(held.lease)
        self.check(before, held.lease.rank)

    def prefixes(self, held: Held, num_tokens: int) -> Prefixes:
        ends = range(self.page_size, num_tokens + 1, self.page_size)
        return {(held.namespace, tuple(held.tokens[:end])) for end in ends}

    def num_free(self) -> list[int]:
        return [cache.num_free for cache in self.kv.of_ranks]

    def check(self, before: list[int], touched: int) -> None:
        """Audit each cache. No rank but `touched` has won or lost a page."""
        self.kv.audit(self.step)
        for rank, (had, has) in enumerate(zip(before, self.num_free(), strict=True)):
            assert rank == touched or had == has
        for rank, cache in enumerate(self.kv.of_ranks):
            used = cache.num_pages - 1 - cache.num_available
            assert used * self.page_size == self.in_use(rank)
        total = self.num_ranks * (self.num_pages - 1)
        assert self.kv.num_pages == 1 + total
        assert self.kv.num_available == self.kv.num_free + self.kv.num_cached <= total


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_any_sequence_of_leases_is_on_the_right_ranks(seed: int) -> None:
    """In caches that are large or so small that pages are evicted and requests give theirs up."""
    rng = random.Random(seed)
    page_size, evicts = rng.randint(1, 4), rng.random() < 0.5
    model = Model(
        num_ranks=rng.randint(2, 4),
        num_slots=rng.randint(1, 4),
        page_size=page_size,
        num_pages=rng.randint(7, 16) if evicts else 1000,
    )
    beginnings = [[rng.randrange(3) for _ in range(rng.randint(0, 12))] for _ in range(4)]
    for _ in range(40):
        room = any(map(model.has_slot, range(model.num_ranks)))
        move = rng.random()
        if move < 0.5 and room:
            own = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
            tokens = (rng.choice(beginnings) + own)[: 6 * page_size]
            namespace = rng.choice([b"", b"", b"a"])
            if model.begin(tokens, namespace, evicts=evicts) is None:
                mine = [held for held in model.held if held.num_committed]
                if mine:  # which is retracted, and may come back to another rank
                    model.end(rng.choice(mine), computed=True)
        elif move < 0.75 and model.held:
            held = rng.choice(model.held)
            model.compute(held, rng.randint(held.num_committed, len(held.tokens)))
        elif model.held:
            model.end(rng.choice(model.held), computed=rng.random() < 0.8)
    for held in [*model.held]:
        model.end(held, computed=True)
    assert model.kv.num_available == model.kv.num_pages - 1


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_without_requests_gets_the_next_one(num_ranks: int) -> None:
    model = Model(num_ranks=num_ranks, num_slots=2, page_size=4, num_pages=50)
    begun = [model.begin([index] * 8, b"", evicts=False) for index in range(2 * num_ranks)]
    assert [held.lease.rank for held in begun if held] == [*range(num_ranks)] * 2
    for held in model.of(num_ranks - 1):
        model.end(held, computed=True)
    assert not any(map(model.has_slot, range(num_ranks - 1)))
    # Its prefix is on a rank that has no slot.
    held = model.begin([0] * 8, b"", evicts=False)
    assert held is not None and held.lease.rank == num_ranks - 1


@pytest.mark.parametrize("source", [Place.DISK, Place.ENGINE])
def test_pages_that_come_to_host_memory_count_as_in_use(source: Place) -> None:
    kv = Model(num_ranks=2, num_slots=2, page_size=4, num_pages=50).kv
    kv.moves.begin(source, Place.HOST, range(3), lambda num_pages: None, rank=0)
    kv.moves.begin(source, Place.DEVICE, range(5), lambda num_pages: None, rank=1)
    assert [kv.best_for(pack_tokens([token]), 1).rank for token in range(3)] == [1, 1, 1]


def test_the_rank_that_has_read_a_prefix_from_disk_takes_the_request_if_it_has_room() -> None:
    model = Model(num_ranks=2, num_slots=2, page_size=4, num_pages=50)
    kv, key = model.kv, pack_tokens([1] * 160)
    kv.moves.begin(Place.DISK, Place.HOST, range(90), lambda num_pages: None, rank=0)
    assert kv.best_for(key, 160).rank == 1
    assert kv.best_for(key, 160, read_on=0).rank == 0
    held = kv.of_ranks[0].acquire(pack_tokens([2] * 48), 48)
    for num_tokens, rank in ((36, 0), (40, 1)):
        assert kv.of_ranks[0].reserve(held, num_tokens) is not None
        assert kv.best_for(key, 160, read_on=0).rank == rank, "49 pages are not enough for both"
    assert kv.best_for(key, 156, read_on=0).rank == 0
    kv.of_ranks[0].acquire(b"", 1)
    assert kv.best_for(key, 156, read_on=0).rank == 1, "it has no slot"
