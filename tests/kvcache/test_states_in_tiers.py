"""Snapshots of states in host memory and on disk: when they come back, and what they count."""

from __future__ import annotations

import pytest
from support.memory_store import MemoryStore

from minisgl.kvcache.copies import Copies, LoadRule
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
    pages_each: int = PAGES_EACH,
    offloads_per_plan: int | None = None,
    num_host_pages: int = 500,
) -> KVCacheManager:
    return KVCacheManager(
        num_pages=num_pages,
        page_size=1,
        cache_type="radix",
        num_host_pages=num_host_pages,
        num_snapshots=num_snapshots,
        pages_each=pages_each,
        offloads_per_plan=offloads_per_plan,
        disk=None if store is None else Disk(store, b"model"),
    )


def open_lease(kv: KVCacheManager, tokens: list[int]) -> Lease:
    lease = kv.acquire(pack_tokens(tokens), len(tokens))
    assert kv.reserve(lease, len(tokens)) is not None
    return lease


def finish(kv: KVCacheManager, lease: Lease, tokens: list[int], step: int) -> None:
    """Compute the prompt of a lease, whose loads have landed, and close it."""
    kv.take_snapshots(lease, lease.num_committed, len(tokens), step)
    kv.commit(lease, pack_tokens(tokens), len(tokens), step)
    kv.close(lease)
    kv.settled(step)
    kv.audit(step)


def run(kv: KVCacheManager, tokens: list[int], step: int) -> Copies:
    """Run a request; returns what it copies."""
    lease = open_lease(kv, tokens)
    copies = kv.tiers.take_copies(step) or Copies()
    for load in copies.loads:
        kv.loads.landed(load.id)
    finish(kv, lease, tokens, step)
    return copies


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


def lose_copies(kv: KVCacheManager, step: int) -> None:
    """Have host memory lose all that it has."""
    kv.tiers.take_copies(step)
    kv.settled(step)
    assert kv.tiers.host.make_room(kv.tiers.host.pool.num_pages)
    kv.audit(step)


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
    lose_copies(kv, 2)
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


@pytest.mark.parametrize(("pages_each", "most"), [(1, 4), (2, 4), (3, 4), (20, 1 + 20)])
def test_snapshots_count_in_the_pace_of_offloads(pages_each: int, most: int) -> None:
    """What is larger than the pace goes alone, with one page."""
    kv = make(num_pages=17, num_snapshots=8, pages_each=pages_each, offloads_per_plan=4)
    counts = [len(run(kv, [10 * step, 0], step).offloads) for step in range(1, 9)]
    assert not kv.num_free
    step, lease, pages = 8, kv.acquire(b"", 1), None
    while pages is None:
        pages = kv.reserve(lease, 16, num_beside=0)
        step += 1
        counts.append(len((kv.tiers.take_copies(step) or Copies()).offloads))
        kv.audit(step)
    assert max(counts) <= most and sum(counts) == 8 * (2 + pages_each)


@pytest.mark.parametrize(("pages_each", "most"), [(3, 4), (20, 1 + 20)])
def test_snapshots_count_in_what_is_copied_ahead(pages_each: int, most: int) -> None:
    kv = make(num_pages=65, num_snapshots=32, pages_each=pages_each, offloads_per_plan=4)
    counts = [len(run(kv, [2 * step, 1], step).offloads) for step in range(1, 33)]
    counts += [len((kv.tiers.take_copies(step) or Copies()).offloads) for step in range(33, 40)]
    assert max(counts) <= most and sum(counts) > 2 * pages_each


OTHER = [6, 7, 8, 9, 0]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_load_takes_no_snapshot_from_which_a_request_is_about_to_begin(is_loaded: bool) -> None:
    """Whose own load has landed, or which found it on the device."""
    kv = make(num_pages=25)
    for step, tokens in enumerate((FIRST, OTHER, SECOND), 1):
        run(kv, tokens, step)
        kv.tiers.offload_all()
        kv.tiers.take_copies(step)
        kv.settled(step)
    if not is_loaded:
        run(kv, FIRST, 8)
    first = open_lease(kv, FIRST)
    copies = kv.tiers.take_copies(9) or Copies()
    assert len(copies.loads) == is_loaded
    for load in copies.loads:
        kv.loads.landed(load.id)
    assert first.start_snapshot == 0 and not kv.is_loading(first)
    other = kv.acquire(pack_tokens(OTHER), len(OTHER))
    assert other.must_load
    assert kv.reserve(other, len(OTHER)) is None, "the load would write what it begins from"
    kv.take_snapshots(first, first.num_committed, len(FIRST), 10)
    assert kv.reserve(other, len(OTHER)) is not None
    assert other.start_snapshot == 0
    kv.close(other)
    kv.close(first)


def test_a_snapshot_of_a_failed_step_is_dropped_though_its_pages_are_older() -> None:
    kv = make(num_pages=25)
    run(kv, FIRST, 1)
    run(kv, SECOND, 2)
    lose_copies(kv, 2)
    lease = open_lease(kv, FIRST)  # which finds no snapshot, and computes all of it again
    assert not lease.num_committed
    kv.take_snapshots(lease, 0, len(FIRST), 3)
    kv.commit(lease, pack_tokens(FIRST), len(FIRST), 3)
    kv.close(lease)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 4
    kv.drop_written_since(3)
    kv.audit(3)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 0
    assert kv.num_cached == len(FIRST) + len(SECOND), "the pages of older steps stay"


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_snapshot_that_a_failed_plan_was_to_load_is_loaded_again(is_planned: bool) -> None:
    kv = make()
    in_both(kv)
    lease = open_lease(kv, FIRST)
    if is_planned:
        copies = kv.tiers.take_copies(5)
        assert copies is not None and [load.pages for load in copies.loads] == [parts(kv)]
    kv.close(lease)
    kv.drop_written_since(5)
    kv.audit(5)
    assert not kv.loads.in_flight
    again = open_lease(kv, FIRST)
    copies = kv.tiers.take_copies(6)
    assert copies is not None and [load.pages for load in copies.loads] == [parts(kv)]
    kv.loads.landed(copies.loads[0].id)
    finish(kv, again, FIRST, 7)


def test_a_load_takes_no_snapshot_that_another_one_still_writes_for_nobody() -> None:
    kv = make(num_pages=25)
    for step, tokens in enumerate((FIRST, OTHER, SECOND), 1):
        run(kv, tokens, step)
        kv.tiers.offload_all()
        kv.tiers.take_copies(step)
        kv.settled(step)
    aborted = open_lease(kv, FIRST)
    copies = kv.tiers.take_copies(4)
    assert copies is not None
    kv.close(aborted)
    other = kv.acquire(pack_tokens(OTHER), len(OTHER))
    assert other.must_load and kv.reserve(other, len(OTHER)) is None
    kv.loads.landed(copies.loads[0].id)
    assert kv.reserve(other, len(OTHER)) is not None
    kv.close(other)


def offloaded_late(kv: KVCacheManager) -> None:
    """Have the pages of FIRST in host memory since step 3, and its snapshot with the next plan."""
    run(kv, FIRST, 1)
    run(kv, SECOND, 2)
    lose_copies(kv, 2)
    kv.tiers.offload_all()
    assert len((kv.tiers.take_copies(3) or Copies()).offloads) == len(FIRST) + 2 + PAGES_EACH
    kv.settled(3)
    run(kv, FIRST, 4)  # computed again, as a snapshot was missing
    kv.tiers.offload_all()


def test_a_page_is_not_written_before_the_snapshot_beside_it_is_settled() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=25)
    offloaded_late(kv)
    assert kv.disk is not None
    for step, has_all in ((4, False), (5, False), (6, True)):
        kv.settled(step)
        kv.disk.store_all()
        written = {key for move in kv.moves.take() for key in move.keys}
        assert (written >= {*names(FIRST[:4])}) == has_all
        assert has_all or not written & {*names(FIRST[:4])[4:]}
        if step == 4:
            assert kv.tiers.take_copies(6) is not None


def test_a_snapshot_that_a_failed_step_copied_leaves_host_memory() -> None:
    kv = make(num_pages=25)
    offloaded_late(kv)
    assert kv.tiers.take_copies(6) is not None
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 4
    kv.drop_written_since(6)
    kv.audit(6)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 0


NEXT = [*FIRST[:4], 5, 6, 7, 0]


@pytest.mark.parametrize("num_come", [0, 3, 4, 5, 7, 8])
def test_where_a_part_of_a_read_comes_a_request_goes_on_from_an_earlier_snapshot(
    num_come: int,
) -> None:
    """Of seven pages and the snapshot at their end: from that of the prompt before, if its pages
    are there."""
    store = MemoryStore()
    kv = make(store, num_snapshots=4)
    store.write(names(FIRST[:4]), [memoryview(b"page")] * 6)
    store.write(names(NEXT[:7]), [memoryview(b"page")] * 9)
    come: list[range] = []
    assert kv.disk is not None
    assert kv.disk.read(pack_tokens(NEXT), len(NEXT), ended=come.append)
    (move,) = kv.moves.take()
    assert [*move.keys] == names(NEXT[:7])
    kv.moves.end(move.id, num_come)
    kv.audit(0)
    found = 4 if num_come >= 4 else 0
    rest = carry_out(kv)
    assert [[*move.keys] for move in rest] == [names(FIRST[:4])[3:]] * bool(found)
    kv.audit(0)
    assert come == [range(min(num_come, 7))] and not kv.moves.take()
    assert kv.match(pack_tokens(NEXT), len(NEXT)) == found
    run(kv, NEXT, 1)
    assert kv.match(pack_tokens(NEXT), len(NEXT)) == 7


@pytest.mark.parametrize("is_in_use", [True, False])
def test_a_snapshot_that_makes_way_is_in_host_memory_before(is_in_use: bool) -> None:
    kv = make(num_pages=25)
    run(kv, FIRST, 1)
    user = open_lease(kv, [*FIRST[:4], 7, 0]) if is_in_use else None
    if user is not None:  # it has begun from the snapshot, and does not need it any more
        kv.take_snapshots(user, user.num_committed, 5, 2)
    offloads = [*run(kv, SECOND, 3).offloads, *(kv.tiers.take_copies(4) or Copies()).offloads]
    assert [page for page, _ in offloads[: 4 + PAGES_EACH]][4:] == [*parts(kv)]
    kv.audit(4)
    if user is not None:
        kv.close(user)
    assert kv.match(pack_tokens(FIRST), len(FIRST)) == 4
    assert len(run(kv, FIRST, 5).loads) == 1


def host_memory_of(num_snapshots: int) -> KVCacheManager:
    """Room for so many prompts of FIRST's length."""
    return make(num_pages=60, num_host_pages=num_snapshots * (5 + PAGES_EACH))


def leave_device(kv: KVCacheManager, step: int) -> None:
    kv.tiers.offload_all()
    kv.tiers.take_copies(step)
    kv.settled(step)
    kv.audit(step)


@pytest.mark.parametrize("branches", [True, False])
def test_host_memory_first_gives_up_snapshots_behind_which_one_prefix_goes_on(
    branches: bool,
) -> None:
    """Those in the middle of a conversation, before older prompts. Where two go on, it stays."""
    kv = host_memory_of(3)
    longer = [*FIRST, 6, 0]
    for step, tokens in ((1, OTHER), (2, FIRST), (3, longer)):
        run(kv, tokens, 2 * step)
        leave_device(kv, 2 * step + 1)
    if branches:
        run(kv, [*FIRST[:4], 8, 0], 8)
    assert kv.tiers.host.make_room(kv.tiers.host.pool.num_free + PAGES_EACH)
    kv.audit(9)
    found = [kv.match(pack_tokens(tokens), len(tokens)) for tokens in (OTHER, FIRST)]
    assert found == ([0, 4] if branches else [4, 0])
