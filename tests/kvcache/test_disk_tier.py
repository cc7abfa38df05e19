"""The disk behind the host tier: what is written, what comes back, and who owns it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from minisgl.kvcache.copies import ALWAYS, Copies, LoadRule
from minisgl.kvcache.disk import Disk, DiskTier
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Move, Place
from minisgl.kvcache.page_keys import page_keys
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.tiers import SPARE_PART
from minisgl.kvcache.transits import Transit


def make(
    store: MemoryStore,
    num_pages: int = 9,
    num_host_pages: int = 50,
    rule: LoadRule = ALWAYS,
    page_size: int = 1,
    offloads_per_plan: int | None = None,
) -> KVCacheManager:
    return KVCacheManager(
        num_pages=num_pages,
        page_size=page_size,
        cache_type="radix",
        num_host_pages=num_host_pages,
        offloads_per_plan=offloads_per_plan,
        disk=Disk(store, b"model", rule),
    )


def disk_of(kv: KVCacheManager) -> DiskTier:
    assert kv.disk is not None
    return kv.disk


def keys(
    tokens: list[int],
    namespace: bytes = b"",
    model: bytes = b"model",
    page_size: int = 1,
    first: int = 0,
) -> list[bytes]:
    packed = pack_tokens(tokens)
    end = len(tokens) // page_size
    return list(page_keys(model, namespace, packed, page_size * TOKEN_BYTES, first, end))


def run(kv: KVCacheManager, tokens: list[int], step: int, namespace: bytes = b"") -> Copies:
    """Run one request, whose step succeeds; returns what its plan copies."""
    key = pack_tokens(tokens)
    lease = kv.acquire(key, len(tokens), namespace)
    assert kv.reserve(lease, len(tokens)) is not None
    copies = kv.tiers.take_copies(step) or Copies()
    kv.commit(lease, key, len(tokens), step)
    for load in copies.loads:
        kv.loads.landed(load.id)
    kv.close(lease)
    kv.settled(step)
    kv.audit(step)
    return copies


def carry_out(
    kv: KVCacheManager, store: MemoryStore, *, num_good: int | None = None
) -> Sequence[Move]:
    """Do the moves, of which `num_good` pages succeed; returns them."""
    moves = kv.moves.take()
    for move in moves:
        if move.target is Place.DISK:
            content = [memoryview(b"page") for _ in move.keys]
            store.write(move.keys, content)
        kv.moves.end(move.id, len(move.keys) if num_good is None else num_good)
    return moves


def test_keys_tell_models_namespaces_and_prefixes_apart() -> None:
    found = [
        *keys([1, 2]),
        *keys([2, 1]),
        *keys([1, 2], model=b"other"),
        *keys([1, 2], namespace=b"salt"),
        *keys([1, 2], page_size=2, model=b"model\0"),
    ]
    assert len(set(found)) == len(found)
    assert keys([1, 2, 3])[:2] == keys([1, 2])
    assert keys([1, 2, 3, 4, 5], page_size=2) == [keys([1, 2, 3, 4])[1], keys([1, 2, 3, 4])[3]]
    assert keys([1, 2, 3], first=1) == keys([1, 2, 3])[1:]


def test_what_host_memory_evicts_is_written_and_read_again() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=5, num_host_pages=24)
    for step in range(1, 13):
        run(kv, [10 * step, 10 * step + 1, 10 * step + 2], step)
        assert not any(move.source is Place.DISK for move in carry_out(kv, store))
    assert set(keys([10, 11, 12])) <= set(store.pages)
    assert store.pages.keys().isdisjoint(keys([120, 121, 122]))
    assert kv.tiers.host.pool.num_free >= 24 // SPARE_PART
    wanted = pack_tokens([10, 11, 12, 13])
    assert kv.match(wanted, 4) < 3
    fetched: list[range] = []
    assert disk_of(kv).read(wanted, 4, ended=fetched.append)
    kv.audit(12)
    (move,) = (found for found in kv.moves.take() if found.source is Place.DISK)
    assert move.keys == tuple(keys([10, 11, 12]))[-len(move.keys) :]
    kv.moves.end(move.id, len(move.keys))
    assert fetched == [range(3 - len(move.keys), 3)]
    kv.audit(12)
    assert kv.match(wanted, 4) == 3
    assert not disk_of(kv).read(wanted, 4)  # nothing is left to read
    copies = run(kv, [10, 11, 12, 13], 13)
    assert set(copies.loads[0].host_pages) >= set(move.pages)


def test_only_settled_pages_are_written() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=5, num_host_pages=4)
    tokens = [1, 2, 3, 4]
    lease = kv.acquire(pack_tokens(tokens), 4)
    kv.reserve(lease, 4)
    kv.tiers.take_copies(1)
    kv.commit(lease, pack_tokens(tokens), 4, 1)
    kv.close(lease)
    other = kv.acquire(pack_tokens([9] * 4), 4)
    kv.reserve(other, 4)
    assert kv.tiers.take_copies(2)  # which offloads all four
    kv.tiers.take_copies(3)
    assert not kv.moves.take()
    kv.settled(2)
    kv.tiers.take_copies(4)
    assert kv.moves.take()
    kv.close(other)
    kv.audit(4)


def test_copies_made_ahead_are_written_once_the_device_has_evicted_their_pages() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=33, num_host_pages=2, offloads_per_plan=8)
    run(kv, [1, 2], 1)
    run(kv, list(range(10, 40)), 2)
    assert kv.tiers.host.pool.num_used == 2  # which leaves none of the pages that are to be free
    for step in (3, 4, 5):
        assert not kv.tiers.take_copies(step) and not kv.moves.take()
        kv.settled(step)
        kv.audit(step)
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, 2)
    kv.tiers.take_copies(6)
    carry_out(kv, store)
    assert set(keys([1, 2])) & set(store.pages)
    kv.close(lease)
    kv.audit(6)


def test_pages_that_are_written_wait_for_that_before_they_are_free() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=5, num_host_pages=8)
    run(kv, [1, 2, 3, 4], 1)
    run(kv, [5, 6, 7, 8], 2)
    run(kv, [9, 10, 11, 12], 3)
    moves = kv.moves.take()
    busy = {page for move in moves for page in move.pages}
    assert busy
    copies = run(kv, [13, 14, 15, 16], 4)
    assert busy.isdisjoint(host_page for _, host_page in copies.offloads)
    for move in moves:
        kv.moves.end(move.id, 0)  # the disk is full
    kv.audit(4)
    assert not store.pages


def test_a_read_that_no_rank_has_whole_counts_as_far_as_all_have_it() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store)
    wanted = pack_tokens([1, 2, 3, 4, 5])
    fetched: list[range] = []
    assert disk_of(kv).read(wanted, 5, ended=fetched.append)
    carry_out(kv, store, num_good=2)
    assert fetched == [range(2)]
    kv.audit(0)
    assert kv.match(wanted, 5) == 2
    assert not disk_of(kv).read(wanted, 5)  # what failed is not looked for again


def test_a_read_whose_prefix_has_gone_is_given_back() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store, num_pages=5, num_host_pages=2)
    run(kv, [1, 2], 1)
    assert disk_of(kv).read(pack_tokens([1, 2, 3, 4]), 4)
    for step, first in enumerate((10, 20, 30), 2):
        run(kv, [first, first, first, first], step)
    carry_out(kv, store)
    kv.audit(4)
    assert kv.match(pack_tokens([1, 2, 3, 4]), 4) == 0


def test_nothing_is_read_where_computing_is_faster() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store, rule=LoadRule(load_s=1.0, compute_s=2.0, delay_s=3.5))
    assert not disk_of(kv).read(
        pack_tokens([1, 2, 3, 4]), 4
    )  # three pages, of which one is computed
    assert disk_of(kv).read(pack_tokens([1, 2, 3, 4, 5]), 5)
    kv.audit(0)


@pytest.mark.parametrize("namespace", [b"", b"b"])
def test_namespaces_share_nothing_on_disk(namespace: bytes) -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3], b"a"), [memoryview(b"page")] * 3)
    kv = make(store)
    assert not disk_of(kv).read(pack_tokens([1, 2, 3, 4]), 4, namespace)
    assert disk_of(kv).read(pack_tokens([1, 2, 3, 4]), 4, b"a")


def test_everything_can_be_written_at_the_end() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=9)
    run(kv, [1, 2, 3], 1)
    run(kv, [4, 5, 6], 2, b"a")
    kv.tiers.offload_all()
    assert kv.tiers.take_copies(3)
    kv.settled(3)
    disk_of(kv).store_all()
    carry_out(kv, store)
    kv.audit(3)
    assert set(store.pages) == {*keys([1, 2, 3]), *keys([4, 5, 6], b"a")}
    disk_of(kv).store_all()
    assert not kv.moves.take()


@dataclass
class Prefix:
    """What another engine sends."""

    key: bytes
    namespace: bytes
    first: int
    named: list[bytes]  # the keys of its pages


@settings(max_examples=120, deadline=None)
@given(
    st.data(),
    st.integers(1, 2),
    st.integers(8, 40),
    st.integers(2, 30),
    st.sampled_from([None, 1, 4]),
)
def test_any_sequence_of_leases_and_transfers_keeps_every_page_as_it_is(
    data: st.DataObject,
    page_size: int,
    num_pages: int,
    num_host_pages: int,
    offloads_per_plan: int | None,
) -> None:
    """Beside the audit: every page holds what its tokens say, as copies and moves move it, to
    and from the disk, and other engines."""
    store = MemoryStore()
    kv = make(store, num_pages, num_host_pages, ALWAYS, page_size, offloads_per_plan)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7 * page_size)
    namespaces = st.sampled_from([b"", b"a"])
    device: dict[int, bytes] = {}  # what each page holds: the key that it should have
    host: dict[int, bytes] = {}
    landing: dict[int, dict[int, bytes]] = {}
    moves: list[Move] = []
    leases: list[Lease] = []
    leaving: list[tuple[Transit, list[bytes]]] = []  # and what its pages should hold
    coming: list[tuple[Transit, Prefix]] = []
    for step in range(1, data.draw(st.integers(1, 30)) + 1):
        if leases and data.draw(st.booleans()):
            kv.close(leases.pop(data.draw(st.integers(0, len(leases) - 1))))
        tokens, namespace = data.draw(prompts), data.draw(namespaces)
        key, count = pack_tokens(tokens), len(tokens)
        named = keys(tokens, namespace, page_size=page_size)
        left = (
            kv.tiers.transits.copy_out(key, count, namespace) if data.draw(st.booleans()) else None
        )
        if left is not None:
            leaving.append((left, named[: len(left.pages)]))
        lease: Lease | None = None
        if not disk_of(kv).read(key, count, namespace):
            lease = kv.acquire(key, count, namespace)
            if kv.reserve(lease, count) is None:
                kv.close(lease)
                lease = None
        copies = kv.tiers.take_copies(step) or Copies()
        for load_id in copies.awaits:
            device |= landing.pop(load_id, {})
        for page, host_page in copies.offloads:
            host[host_page] = device[page]
        for load in copies.loads:
            pairs = zip(load.pages, load.host_pages, strict=True)
            landing[load.id] = {page: host[host_page] for page, host_page in pairs}
            kv.loads.landed(load.id)
        if lease is not None:
            held = {**device, **{p: v for pages in landing.values() for p, v in pages.items()}}
            for index, page in enumerate(lease.pages[: lease.num_committed]):
                assert held[page] == named[index]
            for page, name in list(zip(lease.pages, named, strict=False))[lease.num_committed :]:
                device[page] = name
            kv.commit(lease, key, count, step)
            leases.append(lease)
        if data.draw(st.integers(0, 3)):
            kv.settled(step)
        first = kv.match(key, count, namespace) // page_size
        num_missing = (count - 1) // page_size - first
        if num_missing > 0 and data.draw(st.booleans()):
            expected = kv.tiers.transits.expect(num_missing)
            if expected is not None:
                coming.append((expected, Prefix(key, namespace, first, named[first:])))
        while coming and data.draw(st.booleans()):
            transit, prefix = coming.pop(data.draw(st.integers(0, len(coming) - 1)))
            num_come = data.draw(st.integers(0, len(transit.pages)))
            host |= dict(zip(transit.pages[:num_come], prefix.named, strict=False))
            kv.tiers.transits.adopt(transit, prefix.key, prefix.first, num_come, prefix.namespace)
        while leaving and data.draw(st.booleans()):
            transit, content = leaving.pop(data.draw(st.integers(0, len(leaving) - 1)))
            assert kv.tiers.transits.is_written(transit, step)
            assert [host[page] for page in transit.pages] == content
            kv.tiers.transits.drop(transit)
        moves += kv.moves.take()
        while moves and data.draw(st.booleans()):
            move = moves.pop(data.draw(st.integers(0, len(moves) - 1)))
            num_done = data.draw(st.integers(0, len(move.keys)))
            for name, host_page in list(zip(move.keys, move.pages, strict=True)):
                if move.target is Place.DISK:
                    assert host[host_page] == name
                else:
                    host[host_page] = name
            if move.target is Place.DISK:
                store.write(move.keys, [memoryview(b"page") for _ in move.keys])
            kv.moves.end(move.id, num_done)
        kv.audit(step)
    for lease in leases:
        kv.close(lease)
    for move in moves:
        kv.moves.end(move.id, 0)
    kv.settled(1 << 40)
    for _ in range(100):
        if kv.tiers.take_copies(1 << 29) is None:
            break
        for move in kv.moves.take():
            kv.moves.end(move.id, 0)
    else:
        raise AssertionError("it copies for ever")
    kv.audit(1 << 30)
