"""Snapshots of states in host memory and on disk: when they come back, and what they count."""

from __future__ import annotations

from support.memory_store import MemoryStore

from minisgl.kvcache.copies import ALWAYS, Copies, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.moves import Move, Place
from minisgl.kvcache.page_keys import key_beside, page_keys
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens

FIRST, SECOND, LONG = [1, 2, 3, 4, 0], [5, 0], [*range(10, 18)]
PAGES_EACH = 2


def make(
    store: MemoryStore | None = None,
    num_pages: int = 9,
    num_snapshots: int = 1,
    rule: LoadRule = ALWAYS,
) -> KVCacheManager:
    return KVCacheManager(
        num_pages=num_pages,
        page_size=1,
        cache_type="radix",
        num_host_pages=50,
        num_snapshots=num_snapshots,
        pages_each=PAGES_EACH,
        load_rule=rule,
        disk=None if store is None else Disk(store, b"model"),
    )


def open_lease(kv: KVCacheManager, tokens: list[int]) -> Lease:
    lease = kv.acquire(pack_tokens(tokens), len(tokens))
    assert kv.reserve(lease, len(tokens)) is not None
    return lease


def finish(kv: KVCacheManager, lease: Lease, tokens: list[int], step: int) -> Copies:
    """Compute the prompt of a lease, whose loads have landed, and close it."""
    kv.take_snapshots(lease, lease.num_committed, len(tokens), step)
    copies = kv.tiers.take_copies(step) or Copies()
    kv.commit(lease, pack_tokens(tokens), len(tokens), step)
    kv.close(lease)
    kv.settled(step)
    kv.audit(step)
    return copies


def run(kv: KVCacheManager, tokens: list[int], step: int) -> Copies:
    """Run a request; returns what it copies."""
    lease = open_lease(kv, tokens)
    copies = kv.tiers.take_copies(step) or Copies()
    for load in copies.loads:
        kv.loads.landed(load.id)
    more = finish(kv, lease, tokens, step)
    return Copies(copies.offloads + more.offloads, copies.loads, more.awaits)


def parts(kv: KVCacheManager) -> tuple[int, ...]:
    """Of the first snapshot."""
    return tuple(range(kv.num_pages, kv.num_pages + PAGES_EACH))


def in_both(kv: KVCacheManager) -> None:
    """Have the pages of FIRST on the device and in host memory, with its snapshot in the latter
    alone."""
    run(kv, FIRST, 1)
    assert len(run(kv, LONG, 2).offloads) == len(FIRST) + PAGES_EACH
    assert len(run(kv, FIRST, 3).loads) == 1
    run(kv, SECOND, 4)


def test_a_snapshot_that_the_device_has_lost_comes_back_from_host_memory_alone() -> None:
    kv = make()
    in_both(kv)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 4
    leases = [open_lease(kv, FIRST) for _ in range(2)]  # which share a load
    copies = kv.tiers.take_copies(5)
    assert copies is not None
    (load,) = copies.loads
    assert load.pages == parts(kv)
    for lease in leases:
        assert lease.start_snapshot == 0 and lease.num_committed == 4
        assert kv.is_loading(lease) and not lease.loaded
    kv.audit(5)
    kv.loads.landed(load.id)
    assert not any(map(kv.is_loading, leases))
    for lease in leases:
        finish(kv, lease, FIRST, 6)


def test_it_does_not_come_back_where_computing_is_faster() -> None:
    kv = make()
    in_both(kv)
    for load_s, num_found in ((2.0, 0), (1.9, 4)):  # for two parts, and 1.0 for each page
        kv.tiers.host.device.rule = LoadRule(load_s, compute_s=1.0)
        lease = kv.acquire(pack_tokens(FIRST), len(FIRST))
        assert (lease.num_committed, lease.must_load) == (num_found, num_found > 0)
        kv.close(lease)


def names(tokens: list[int]) -> list[bytes]:
    packed = pack_tokens(tokens)
    pages = [*page_keys(b"model", b"", packed, TOKEN_BYTES, 0, len(tokens))]
    return [*pages, *(key_beside(pages[-1], index) for index in range(PAGES_EACH))]


def carry_out(kv: KVCacheManager) -> list[Move]:
    moves = [*kv.moves.take()]
    for move in moves:
        kv.moves.end(move.id, len(move.pages))
    return moves


def test_a_snapshot_that_the_device_has_lost_comes_back_from_disk_with_its_page() -> None:
    store = MemoryStore()
    store.write(names(FIRST[:4]), [memoryview(b"page")] * 6)
    kv = make(store)
    assert run(kv, FIRST, 1) == Copies()
    run(kv, SECOND, 2)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 0
    assert kv.disk is not None and kv.disk.read(pack_tokens(FIRST), len(FIRST))
    (move,) = carry_out(kv)
    assert move.source is Place.DISK and [*move.keys] == names(FIRST[:4])[3:]
    kv.audit(2)
    lease = open_lease(kv, FIRST)
    copies = kv.tiers.take_copies(3)
    assert copies is not None
    assert lease.num_committed == 4 and [load.pages for load in copies.loads] == [parts(kv)]
    kv.loads.landed(copies.loads[0].id)
    finish(kv, lease, FIRST, 4)
    assert not kv.disk.read(pack_tokens(FIRST), len(FIRST)), "the disk is asked in vain"
