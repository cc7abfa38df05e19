"""The host tier of the prefix cache: what is demoted, loaded, dropped, and who owns it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache.copies import ALWAYS, Copies, LoadRule
from minisgl.kvcache.host_tier import CopiesAhead, HostTier
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_pool import HostPool, PagePool
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Node, PrefixTree


def make(
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
        load_rule=rule,
    )


def open_lease(kv: KVCacheManager, tokens: list[int], namespace: bytes = b"") -> Lease:
    lease = kv.acquire(pack_tokens(tokens), len(tokens), namespace)
    assert kv.reserve(lease, len(tokens)) is not None
    return lease


def run(kv: KVCacheManager, tokens: list[int], step: int, namespace: bytes = b"") -> Copies:
    """Run one request that needs nothing from host memory; returns what its plan copies."""
    lease = open_lease(kv, tokens, namespace)
    assert not lease.loads
    kv.commit(lease, pack_tokens(tokens), len(tokens), step)
    copies = kv.tiers.take_copies(step)
    kv.close(lease)
    kv.audit(step)
    return copies or Copies()


def test_an_evicted_prefix_is_offloaded_and_loaded_again() -> None:
    kv = make(num_pages=9)
    assert run(kv, [1, 2, 3, 4], 1) == Copies()
    copies = run(kv, [5, 6, 7, 8, 9, 10], 2)
    assert len(copies.offloads) == 2 and not copies.loads  # the tail, as far as pages are needed
    lease = open_lease(kv, [1, 2, 3, 4, 5])
    found = kv.tiers.take_copies(3)
    assert found is not None and len(found.loads) == 1
    (load,) = found.loads
    assert load.host_pages == tuple(host for _, host in copies.offloads)
    assert load.pages == tuple(lease.pages[2:4])
    assert (lease.num_committed, len(lease.loaded)) == (4, 2)
    assert kv.is_loading(lease)
    kv.audit(3)
    kv.loads.landed(load.id)
    assert not kv.is_loading(lease)
    assert kv.tiers.take_copies(4) == Copies(awaits=(load.id,))
    kv.close(lease)
    kv.audit(4)


def test_a_loaded_prefix_is_evicted_again_without_a_copy() -> None:
    kv = make(num_pages=5)
    run(kv, [1, 2, 3], 1)
    assert len(run(kv, [4, 5, 6, 7], 2).offloads) == 3
    lease = open_lease(kv, [1, 2, 3, 0])
    copies = kv.tiers.take_copies(3)
    assert copies is not None and len(copies.offloads) == 4
    kv.loads.landed(copies.loads[0].id)
    kv.close(lease)
    lease = open_lease(kv, [7, 7, 7, 7])
    copies = kv.tiers.take_copies(4)
    assert copies is not None and not copies.offloads
    kv.close(lease)
    kv.audit(4)


def test_a_prefix_that_is_computed_faster_is_not_loaded() -> None:
    kv = make(num_pages=5, rule=LoadRule(load_s=1.0, compute_s=2.0, delay_s=2.5))
    run(kv, [1, 2, 3], 1)
    run(kv, [4, 5, 6, 7], 2)
    lease = open_lease(kv, [1, 2, 0])  # 2 pages: 4.5 s against 4
    assert not lease.loads and lease.num_committed == 0
    kv.close(lease)
    lease = open_lease(kv, [1, 2, 3, 0])  # 3 pages: 5.5 s against 6
    assert lease.loads and lease.num_committed == 3
    kv.close(lease)


def test_computed_pages_join_the_copies_that_host_memory_has() -> None:
    """So that they need no second copy when they are evicted."""
    kv = make(num_pages=5, rule=LoadRule(load_s=2.0, compute_s=1.0))
    run(kv, [1, 2, 3], 1)
    run(kv, [4, 5, 6, 7], 2)
    assert len(run(kv, [1, 2, 3, 8], 3).offloads) == 4  # of the second prompt
    assert len(run(kv, [9, 9, 9, 9], 4).offloads) == 1  # 8, which is new
    assert kv.tiers.host.pool.num_used == 8


def test_requests_with_the_same_prefix_share_a_load() -> None:
    kv = make(num_pages=12)
    run(kv, [1, 2, 3, 4], 1)
    run(kv, [0] * 11, 2)
    leases = [open_lease(kv, [1, 2, 3, 4, last]) for last in (5, 6)]
    copies = kv.tiers.take_copies(3)
    assert copies is not None and len(copies.loads) == 1
    assert all(kv.is_loading(lease) for lease in leases)
    assert [len(lease.loaded) for lease in leases] == [4, 4]
    kv.close(leases[0])  # it was aborted; the other still waits
    kv.audit(3)
    assert kv.is_loading(leases[1])
    kv.loads.landed(copies.loads[0].id)
    assert not kv.is_loading(leases[1])
    kv.close(leases[1])
    kv.audit(4)


def test_pages_of_a_load_that_nobody_wants_are_used_after_a_plan_has_awaited_it() -> None:
    kv = make(num_pages=6)
    run(kv, [1, 2, 3], 1)
    run(kv, [0] * 5, 2)
    lease = open_lease(kv, [1, 2, 3, 4])
    copies = kv.tiers.take_copies(3)
    assert copies is not None
    (load,) = copies.loads
    kv.close(lease)
    assert kv.num_available == 2  # the three in flight are locked
    other = open_lease(kv, [9] * 5)
    assert set(load.pages) <= set(other.pages)
    copies = kv.tiers.take_copies(4)
    assert copies is not None and copies.awaits == (load.id,)
    kv.loads.landed(load.id)  # later: nothing is left to do
    kv.audit(4)
    assert kv.tiers.take_copies(5) is None
    kv.close(other)


def test_a_failed_step_takes_its_copies_along() -> None:
    kv = make(num_pages=7)
    run(kv, [1, 2, 3], 1)
    run(kv, [4, 5, 6, 7, 8, 9], 2)  # offloads 1, 2, 3
    kv.drop_written_since(2)
    kv.audit(2)
    assert kv.tiers.host.pool.num_used == 0
    assert kv.match(pack_tokens([1, 2, 3, 0]), 4) == 0


def test_a_load_of_a_failed_step_is_awaited_and_its_prefix_loaded_again() -> None:
    kv = make(num_pages=6)
    run(kv, [1, 2, 3], 1)
    run(kv, [0] * 5, 2)
    lease = open_lease(kv, [1, 2, 3, 4])
    copies = kv.tiers.take_copies(3)
    assert copies is not None
    kv.close(lease)
    kv.drop_written_since(3)
    kv.audit(3)
    lease = open_lease(kv, [1, 2, 3, 4])
    again = kv.tiers.take_copies(4)
    assert again is not None and again.awaits == (copies.loads[0].id,)
    assert again.loads[0].host_pages == copies.loads[0].host_pages
    kv.close(lease)
    kv.audit(4)


def offloaded(kv: KVCacheManager, step: int) -> list[int]:
    """The device pages that the plan of `step` copies."""
    copies = kv.tiers.take_copies(step)
    kv.audit(step)
    return [] if copies is None else [page for page, _ in copies.offloads]


def fill(kv: KVCacheManager, *prompts: list[int]) -> list[list[int]]:
    """Run prompts in steps 1, 2, ...; returns the pages of each."""
    pages = []
    for step, tokens in enumerate(prompts, 1):
        lease = open_lease(kv, tokens)
        kv.commit(lease, pack_tokens(tokens), len(tokens), step)
        kv.close(lease)
        pages.append(lease.pages)
    return pages


def test_what_is_evicted_next_is_copied_ahead_and_stays() -> None:
    """Two pages are to be free, or to have copies."""
    kv = make(num_pages=33, offloads_per_plan=10)
    old, _ = fill(kv, [1, 2, 3, 4], list(range(10, 37)))
    assert offloaded(kv, 3) == [old[3]]  # one is free
    assert offloaded(kv, 4) == []
    assert kv.match(pack_tokens([1, 2, 3, 4, 0]), 5) == 4
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, 2)
    assert lease.pages[-1] == old[3]
    assert offloaded(kv, 5) == [old[1], old[2]]  # the next ones, for which nobody waits
    assert kv.match(pack_tokens([1, 2, 3, 4, 0]), 5) == 4  # one of them in host memory only
    kv.close(lease)


def test_a_prefix_that_is_used_again_keeps_its_copy_and_the_next_one_is_copied() -> None:
    kv = make(num_pages=33, offloads_per_plan=10)
    first, second, _ = fill(kv, [1], [2], list(range(10, 39)))
    assert offloaded(kv, 4) == [first[0]]
    kv.close(open_lease(kv, [1, 0]))
    assert kv.num_free == 1
    kv.close(open_lease(kv, [1, 0]))
    assert kv.tiers.host.pool.num_used == 1
    assert offloaded(kv, 5) == [second[0]]
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, 2)
    assert [kv.match(pack_tokens([token, 0]), 2) for token in (1, 2)] == [1, 1]
    kv.close(lease)


def test_a_match_that_splits_what_was_copied_ahead_leaves_its_end_ahead() -> None:
    kv = make(num_pages=33, offloads_per_plan=10)
    old, young = fill(kv, [1, 2, 3, 4], list(range(10, 38)))
    assert offloaded(kv, 3) == old[2:]
    kv.close(kv.acquire(pack_tokens([1, 2, 3, 0]), 4))
    kv.audit(3)
    assert offloaded(kv, 4) == young[-1:]  # in place of the page that was used


def test_children_are_copied_before_their_parents_and_are_no_obstacle() -> None:
    kv = make(num_pages=65, offloads_per_plan=3)
    system = [1, 2]
    pages = fill(kv, [*system, 3], [*system, 4], list(range(100, 160)))
    expected = [pages[0][2], pages[1][2], pages[0][1], pages[0][0]]
    found = [page for step in range(4, 9) for page in offloaded(kv, step)]
    assert found[:3] == expected[:3] and kv.num_free == 0
    assert len(found) == 4  # a sixteenth of the device's pages
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, 4)
    assert len(set(expected) & set(lease.pages)) == 4
    kv.close(lease)


def test_copying_ahead_visits_only_what_it_copies() -> None:
    """However many prefixes there are, all with the same first page."""

    def visits(num_prompts: int) -> int:
        cache, count = RadixCache(PrefixTree(1), PagePool(0), ALWAYS), 0
        ahead = CopiesAhead(HostTier(cache, HostPool(5000), 20), 20, may_drop=True)
        for index in range(num_prompts):
            key = pack_tokens([0, index, 1, 2])
            match = cache.acquire(key, 4)
            cache.insert(match.node, key, len(match.pages), range(4 * index, 4 * index + 3))
            cache.tree.release(match.node)
        is_fresh = ahead._is_fresh

        def counting(entry: tuple[int, int, Node]) -> bool:
            nonlocal count
            count += 1
            return is_fresh(entry)

        ahead._is_fresh = counting  # type: ignore[method-assign]
        ahead.copy()
        assert ahead.num_copied == 20
        return count

    assert visits(10) == visits(1000)


def test_nothing_is_copied_while_the_device_has_room() -> None:
    kv = make(num_pages=65, offloads_per_plan=8)
    prompts = [[n, n + 1, n + 2, n + 3] for n in range(0, 140, 10)]
    for round in range(3):
        for index, tokens in enumerate(prompts):
            assert run(kv, tokens, 100 * round + index + 1) == Copies()
    assert kv.tiers.host.pool.num_used == 0


def test_a_plan_beside_decode_rows_makes_room_as_far_as_its_copies_go() -> None:
    kv = make(num_pages=13, page_size=2, offloads_per_plan=3)
    fill(kv, list(range(24)))
    lease = kv.acquire(pack_tokens([50] * 16), 16)
    for step, done in enumerate((False, False, True), 2):
        pages = kv.reserve(lease, 16, num_beside=0)
        assert (pages is not None) == done
        assert len(offloaded(kv, step)) <= 3
    kv.close(lease)
    for num_beside, joins in ((2, False), (10, True), (None, True)):
        kv = make(num_pages=13, page_size=2, offloads_per_plan=3)
        fill(kv, list(range(24)))
        lease = kv.acquire(pack_tokens([50] * 16), 16)
        assert (kv.reserve(lease, 16, num_beside=num_beside) is not None) == joins
        assert len(offloaded(kv, 2)) == (8 if joins else 3)
        kv.close(lease)


def test_copies_ahead_push_out_no_copy_of_what_the_device_evicts_sooner() -> None:
    kv = make(num_pages=65, num_host_pages=2, offloads_per_plan=8)
    pages = fill(kv, [1], [2], [3], list(range(10, 71)))
    assert offloaded(kv, 5) == [pages[0][0], pages[1][0]]
    assert offloaded(kv, 6) == []
    assert kv.match(pack_tokens([1, 0]), 2) == 1


def test_a_failed_step_takes_the_copies_along_that_it_made_ahead() -> None:
    kv = make(num_pages=33, offloads_per_plan=10)
    pages = fill(kv, [1, 2, 3], list(range(10, 38)))
    assert offloaded(kv, 3) == [pages[0][2]]
    kv.drop_written_since(3)
    kv.audit(3)
    assert kv.tiers.host.pool.num_used == 0 and kv.match(pack_tokens([1, 2, 3, 0]), 4) == 3
    assert offloaded(kv, 4) == [pages[0][2]]


def test_host_memory_drops_the_least_recently_used_leaf() -> None:
    kv = make(num_pages=4, num_host_pages=6)
    for step, first in enumerate((10, 20, 30), 1):
        run(kv, [first, first + 1, first + 2], step)
    lease = open_lease(kv, [10, 11, 12][:2])  # the oldest is used again
    kv.tiers.take_copies(4)
    kv.close(lease)
    run(kv, [40, 41, 42], 5)
    run(kv, [50, 51, 52], 6)
    found = [kv.match(pack_tokens([n, n + 1, n + 2, 0]), 4) for n in (10, 20, 30, 40, 50)]
    assert found[1] == 0 and found[4] == 3 and found[0] >= 1


def test_namespaces_share_no_host_pages() -> None:
    kv = make(num_pages=5)
    run(kv, [1, 2, 3], 1, b"a")
    run(kv, [0] * 4, 2, b"b")
    assert kv.match(pack_tokens([1, 2, 3, 4]), 4, b"a") == 3
    assert kv.match(pack_tokens([1, 2, 3, 4]), 4, b"b") == 0
    lease = open_lease(kv, [1, 2, 3, 4], b"c")
    assert not lease.loads and lease.num_committed == 0
    kv.close(lease)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv, lease: kv.tiers.host.pool.free_pages.append(0),
        lambda kv, lease: kv.tiers.host.pool.free_pages.pop(),
        lambda kv, lease: kv.tiers.host.pages[lease.node].append(7),
        lambda kv, lease: kv.loads.in_flight.clear(),
        lambda kv, lease: kv._cache._num_below.update({lease.node: 1}),
        lambda kv, lease: kv.tiers._ahead._num_below.update({lease.node: 1}),
        lambda kv, lease: kv.tiers._ahead.copied.add(lease.node),
        lambda kv, lease: setattr(kv.tiers._ahead, "num_copied", 1),
        lambda kv, lease: kv.tiers.host.pool.written_by.__setitem__(
            kv.tiers.host.pages[lease.node][0], 99
        ),
    ],
)
def test_the_audit_detects_damage_of_the_host_tier(damage: object) -> None:
    kv = make(num_pages=5)
    run(kv, [1, 2, 3], 1)
    run(kv, [0] * 4, 2)
    lease = open_lease(kv, [1, 2, 3, 4])
    kv.tiers.take_copies(3)
    kv.audit(3)
    damage(kv, lease)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        kv.audit(3)


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.integers(8, 50),
    st.integers(1, 60),
    st.sampled_from([None, 1, 3, 20]),
)
def test_any_sequence_of_leases_and_loads_keeps_every_page_accounted_for(
    data: st.DataObject,
    page_size: int,
    num_pages: int,
    num_host_pages: int,
    offloads_per_plan: int | None,
) -> None:
    """Beside the audit: every page holds what its tokens say, as copies move it."""
    kv = make(num_pages, num_host_pages, page_size=page_size, offloads_per_plan=offloads_per_plan)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7 * page_size)
    namespaces = st.sampled_from([b"", b"a"])
    device: dict[int, object] = {}  # what each page holds
    host: dict[int, object] = {}
    landing: dict[int, dict[int, object]] = {}
    leases: list[tuple[Lease, list[int], bytes]] = []

    def launch(step: int) -> None:
        copies = kv.tiers.take_copies(step) or Copies()
        for load in copies.awaits:
            device.update(landing.pop(load, {}))
        for page, host_page in copies.offloads:
            host[host_page] = device[page]
        for found in copies.loads:
            brought = {p: host[h] for h, p in zip(found.host_pages, found.pages, strict=True)}
            landing[found.id] = brought
            device.update(dict.fromkeys(found.pages))

    for step in range(1, data.draw(st.integers(1, 25)) + 1):
        move = data.draw(st.integers(0, 9))
        if move < 4 and leases:
            lease, tokens, _ = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
            kv.close(lease, pack_tokens(tokens), lease.num_committed * page_size, step)
        elif move == 4 and landing:
            load = data.draw(st.sampled_from(sorted(landing)))
            device.update(landing[load])
            kv.loads.landed(load)
        elif move == 5:
            for lease, *_ in leases:
                kv.close(lease)
            leases.clear()
            kv.drop_written_since(step - data.draw(st.integers(0, 2)))
        else:
            tokens, namespace = data.draw(prompts), data.draw(namespaces)
            key = pack_tokens(tokens)
            lease = kv.acquire(key, len(tokens), namespace)
            num_beside = data.draw(st.sampled_from([None, 0, 4]))
            if kv.reserve(lease, len(tokens), num_beside=num_beside) is None:
                kv.close(lease)
            else:
                launch(step)
                while kv.is_loading(lease):
                    for load in lease.loads.keys() & landing.keys():
                        device.update(landing[load])
                        kv.loads.landed(load)
                for index, page in enumerate(lease.pages):
                    held = (namespace, tuple(tokens[: (index + 1) * page_size]))
                    if index < lease.num_committed:
                        assert device[page] == held, "a page holds other tokens"
                    device[page] = held
                kv.commit(lease, key, len(tokens) // 2, step)
                leases.append((lease, tokens, namespace))
        launch(step)
        kv.audit(step)
    for lease, *_ in leases:
        kv.close(lease)
    for load in [*landing]:
        kv.loads.landed(load)
    kv.audit(1 << 30)
    assert kv.num_available == num_pages - 1
    assert any(kv.tiers.take_copies(1 << 29) is None for _ in range(100)), "it copies for ever"
    kv.audit(1 << 30)
