"""Prefixes that leave for other engines, and prefixes of theirs: who owns each host page."""

from __future__ import annotations

import random

from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.transits import Transit

PAGE = 4


def manager(
    num_pages: int = 20, num_host_pages: int = 12, max_in_transit: int = 0
) -> KVCacheManager:
    return KVCacheManager(
        num_pages=num_pages,
        page_size=PAGE,
        cache_type="radix",
        num_host_pages=num_host_pages,
        max_in_transit=max_in_transit,
    )


def compute(kv: KVCacheManager, tokens: list[int], step: int = 1) -> None:
    """Leave the full pages of `tokens` in the cache, written by `step`."""
    key = pack_tokens(tokens)
    lease = kv.acquire(key, len(tokens))
    assert kv.reserve(lease, len(tokens)) is not None
    kv.close(lease, key, len(tokens), step)


def test_a_copy_that_leaves_locks_nothing_and_an_adopted_one_is_loaded() -> None:
    sender, receiver = manager(), manager()
    tokens = [*range(13)]
    key = pack_tokens(tokens)
    compute(sender, tokens)
    transit = sender.tiers.transits.copy_out(key, len(tokens))
    assert transit is not None and len(transit.pages) == 3
    assert sender.tiers.transits.is_copying_out and not sender.tiers.transits.is_written(transit, 1)
    assert sender.num_available == 19, "nothing is locked"
    copies = sender.tiers.take_copies(2)
    assert copies is not None and [host for _, host in copies.offloads] == [*transit.pages]
    assert not sender.tiers.transits.is_copying_out and sender.tiers.transits.is_written(transit, 2)
    sender.audit(2)
    sender.tiers.transits.drop(transit)
    sender.audit(2)
    assert sender.tiers.host.pool.num_used == 0

    expected = receiver.tiers.transits.expect(3)
    assert expected is not None and receiver.match(key, len(tokens)) == 0
    receiver.audit(0)
    receiver.tiers.transits.adopt(expected, key, 0, 3)
    receiver.audit(0)
    assert receiver.match(key, len(tokens)) == 12
    lease = receiver.acquire(key, len(tokens))
    assert receiver.reserve(lease, len(tokens)) is not None
    loads = receiver.tiers.take_copies(1)
    assert loads is not None and list(loads.loads[0].host_pages) == [*expected.pages]


def test_pages_that_came_twice_or_have_lost_their_prefix_are_freed() -> None:
    kv = manager()
    key = pack_tokens([*range(17)])
    first, second, orphan = (
        kv.tiers.transits.expect(2),
        kv.tiers.transits.expect(4),
        kv.tiers.transits.expect(2),
    )
    assert first is not None and second is not None and orphan is not None
    kv.tiers.transits.adopt(first, key, 0, 2)
    kv.tiers.transits.adopt(second, key, 0, 3)  # one of its four pages did not come
    assert kv.match(key, 17) == 12 and kv.tiers.host.pool.num_used == 5
    kv.tiers.transits.adopt(orphan, pack_tokens([*range(100, 117)]), 2, 2)
    assert kv.tiers.host.pool.num_used == 3
    kv.audit(0)
    assert kv.tiers.transits.expect(10) is not None, "adopted pages make room for others"
    assert kv.tiers.transits.expect(3) is None
    kv.audit(0)


def test_a_prefix_larger_than_host_memory_pushes_nothing_out_of_it() -> None:
    kv = manager(num_host_pages=4)
    compute(kv, [*range(33)])
    cached = kv.tiers.transits.expect(4)
    assert cached is not None
    kv.tiers.transits.adopt(cached, pack_tokens([*range(100, 117)]), 0, 4)
    assert (
        kv.tiers.transits.copy_out(pack_tokens([*range(33)]), 33) is None
        and kv.tiers.transits.expect(5) is None
    )
    assert kv.match(pack_tokens([*range(100, 117)]), 17) == 16
    kv.audit(1)


def test_a_failed_step_takes_the_copies_that_it_was_to_make() -> None:
    kv = manager()
    compute(kv, [*range(13)])
    written, unplanned = (
        kv.tiers.transits.copy_out(pack_tokens([*range(13)]), 13) for _ in range(2)
    )
    assert written is not None and unplanned is not None
    kv.tiers.take_copies(2)
    late = kv.tiers.transits.copy_out(pack_tokens([*range(13)]), 13)
    assert late is not None
    kv.drop_written_since(3)
    assert late.failed and not written.failed
    kv.drop_written_since(2)
    assert written.failed and unplanned.failed and kv.tiers.host.pool.num_used == 0
    kv.tiers.transits.drop(written)  # has no effect
    kv.audit(2)


def test_whoever_waits_for_a_copy_hears_once_whether_it_was_made() -> None:
    kv = manager(num_host_pages=30)
    compute(kv, [*range(13)])
    heard: list[list[bool]] = [[], [], []]
    transits = [kv.tiers.transits.copy_out(pack_tokens([*range(13)]), 13, b"", heard[0].append)]
    kv.tiers.take_copies(2)
    kv.settled(1)
    assert not kv.tiers.transits.is_copying_out and not heard[0], (
        "the step that copies is in flight"
    )
    transits.append(kv.tiers.transits.copy_out(pack_tokens([*range(13)]), 13, b"", heard[1].append))
    assert kv.tiers.transits.is_copying_out
    kv.tiers.take_copies(3)
    kv.drop_written_since(3)
    assert heard == [[], [False], []]
    kv.settled(2)
    kv.settled(3)
    assert heard == [[True], [False], []]
    lent = kv.tiers.transits.copy_out(pack_tokens([*range(13)]), 13, b"", heard[2].append)
    kv.tiers.transits.give_up()
    kv.tiers.take_copies(4)
    kv.settled(4)
    assert heard == [[True], [False], [False]]
    for transit in (*transits, lent):
        assert transit is not None
        kv.tiers.transits.drop(transit)
    assert kv.tiers.host.pool.num_used == 0
    kv.audit(4)


def test_a_lent_prefix_is_copied_out_instead_and_unlocked() -> None:
    kv = manager(max_in_transit=3)
    compute(kv, [*range(13)])
    kv.settled(1)
    lent = kv.tiers.transits.lend(pack_tokens([*range(13)]), 13)
    assert lent is not None and kv.num_available == 16
    copy = kv.tiers.transits.copy_lent(lent)
    assert copy is not None and kv.num_available == 19
    copies = kv.tiers.take_copies(2)
    assert copies is not None and list(copies.offloads) == [
        *zip(lent.pages, copy.pages, strict=True)
    ]
    again = kv.tiers.transits.lend(pack_tokens([*range(13)]), 13)
    assert again is not None
    full = kv.tiers.transits.expect(9)
    assert full is not None and kv.tiers.transits.copy_lent(again) is None, "host memory is full"
    assert kv.num_available == 19, "what was lent has ended"
    kv.audit(2)


def test_a_lent_prefix_stays_and_an_adopted_one_is_on_the_device() -> None:
    sender, receiver = manager(max_in_transit=3), manager(max_in_transit=3)
    tokens = [*range(13)]
    key = pack_tokens(tokens)
    compute(sender, tokens)
    assert sender.tiers.transits.lend(key, len(tokens)) is None, "the step that wrote it may fail"
    sender.settled(1)
    lent = sender.tiers.transits.lend(key, len(tokens))
    assert lent is not None and len(lent.pages) == 3 and sender.num_available == 16
    assert sender.tiers.transits.lend(key, len(tokens)) is None, "three pages are in transit"
    other = sender.acquire(b"", 0)
    assert sender.reserve(other, 17 * PAGE) is None and sender.reserve(other, 16 * PAGE)
    sender.drop_written_since(2)
    sender.audit(2)
    sender.tiers.transits.drop(lent)
    sender.close(other)
    assert sender.num_available == 19
    sender.audit(2)

    coming = receiver.tiers.transits.expect_on_device(key, 0, 3)
    assert coming is not None and receiver.match(key, len(tokens)) == 0
    assert (
        receiver.num_available == 16 and receiver.tiers.transits.expect_on_device(key, 0, 1) is None
    )
    receiver.audit(0)
    receiver.tiers.transits.adopt(coming, key, 0, 2)  # one of its pages did not come
    receiver.audit(0)
    assert receiver.num_available == 19 and receiver.tiers.host.pool.num_used == 0
    lease = receiver.acquire(key, len(tokens))
    assert lease.pages == list(coming.pages[:2])
    rest = receiver.tiers.transits.expect_on_device(key, 2, 1)
    assert rest is not None
    receiver.tiers.transits.adopt(rest, key, 2, 1)
    twice = receiver.tiers.transits.expect_on_device(key, 1, 2)
    assert twice is not None
    receiver.tiers.transits.adopt(twice, key, 1, 2)
    receiver.close(lease)
    assert receiver.match(key, len(tokens)) == 12 and receiver.num_cached == 3
    receiver.audit(0)


def test_pages_that_a_plan_has_to_do_with_are_not_given_to_another_engine() -> None:
    kv = manager(num_pages=8, max_in_transit=7)
    compute(kv, [*range(21)])  # five of the seven pages
    key = pack_tokens([*range(100, 121)])
    assert kv.tiers.transits.expect_on_device(key, 0, 3) is None, (
        "only a plan may evict what has no copy"
    )
    assert kv.tiers.transits.expect_on_device(key, 1, 1) is None, "nothing is before it"
    assert kv.tiers.transits.copy_out(pack_tokens([*range(21)]), 21) is not None
    assert kv.tiers.transits.expect_on_device(key, 0, 2) is None, "the next plan reads pages"
    kv.tiers.take_copies(2)
    kept = kv.tiers.transits.expect_on_device(key, 0, 2)
    assert kept is not None
    kv.audit(2)
    kv.tiers.transits.drop(kept)
    lease = kv.acquire(key, 21)
    assert kv.reserve(lease, 21) is not None  # evicts, with copies
    kv.tiers.take_copies(3)
    kv.close(lease)
    lease = kv.acquire(pack_tokens([*range(21)]), 21)
    assert lease.num_to_load and kv.reserve(lease, 21) is not None
    assert kv.tiers.transits.expect_on_device(key, 0, 1) is None, "the next plan loads"
    assert kv.tiers.transits.lend(pack_tokens([*range(21)]), 21) is None, "it is being loaded"
    copies = kv.tiers.take_copies(4)
    assert copies is not None
    for load in copies.loads:
        kv.loads.landed(load.id)
    assert kv.tiers.transits.expect_on_device(key, 0, 1) is None, "the next plan waits for a load"
    kv.tiers.take_copies(5)
    assert kv.tiers.transits.expect_on_device(key, 0, 1) is not None
    kv.close(lease)
    kv.audit(5)


def test_pages_that_have_lost_their_prefix_on_the_way_are_free() -> None:
    kv = manager(num_pages=12, num_host_pages=1, max_in_transit=8)
    key = pack_tokens([*range(21)])
    compute(kv, [*range(9)])
    coming = kv.tiers.transits.expect_on_device(key, 2, 3)
    assert coming is not None
    lease = kv.acquire(b"", 0)
    assert kv.reserve(lease, 8 * PAGE) is not None  # evicts what is before them
    kv.tiers.transits.adopt(coming, key, 2, 3)
    assert kv.match(key, 21) == 0 and kv.num_free == 3
    kv.close(lease)
    kv.audit(1)


def test_pages_that_came_behind_a_step_that_fails_go_with_it() -> None:
    kv = manager(num_pages=12, max_in_transit=8)
    tokens = [*range(25)]
    key = pack_tokens(tokens)
    compute(kv, tokens[:5])
    kv.settled(1)
    coming = kv.tiers.transits.expect_on_device(key, 1, 5)
    assert coming is not None
    lease = kv.acquire(key, 9)
    assert kv.reserve(lease, 9) is not None
    kv.commit(lease, key, 9, 2)  # what is before the others, in flight
    kv.tiers.transits.adopt(coming, key, 1, 5)
    assert kv.match(key, 25) == 24 and kv.tiers.transits.lend(key, 25) is None, "a step may fail"
    kv.audit(2)
    kv.close(lease)
    kv.drop_written_since(2)
    assert kv.match(key, 25) == 4 and kv.num_free == 10
    kv.audit(2)


def test_random_transits_beside_evictions_keep_every_page_with_one_owner() -> None:
    rng = random.Random(0)
    kv = manager(num_pages=14, num_host_pages=16, max_in_transit=6)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(5, 30))] for _ in range(30)]
    leaving: list[Transit] = []
    coming: list[tuple[Transit, list[int], int]] = []
    num_adopted = num_lent = num_on_device = 0
    for step in range(1, 900):
        tokens = rng.choice(prompts)
        key, most = pack_tokens(tokens), (len(tokens) - 1) // PAGE
        action = rng.randrange(7)
        if action == 0:
            lease = kv.acquire(key, len(tokens))
            got = kv.reserve(lease, len(tokens))
            copies = kv.tiers.take_copies(step)
            for load in copies.loads if copies is not None else ():
                kv.loads.landed(load.id)
            kv.tiers.take_copies(step)
            kv.close(lease, *((key, len(tokens), step) if got is not None else ()))
        elif action == 1 and (transit := kv.tiers.transits.copy_out(key, len(tokens))) is not None:
            leaving.append(transit)
            kv.tiers.take_copies(step)
        elif action == 2 and leaving:
            kv.tiers.transits.drop(leaving.pop(rng.randrange(len(leaving))))
        elif action in (3, 5):
            first = kv.match(key, len(tokens)) // PAGE
            if most == first:
                continue
            if action == 3:
                arriving = kv.tiers.transits.expect(most - first)
            else:
                arriving = kv.tiers.transits.expect_on_device(key, first, most - first)
                num_on_device += arriving is not None
            if arriving is not None:
                coming.append((arriving, tokens, first))
        elif action == 6:
            kv.settled(step - 1)
            if (transit := kv.tiers.transits.lend(key, len(tokens))) is not None:
                leaving.append(transit)
                num_lent += 1
            if rng.random() < 0.2:
                kv.drop_written_since(step)
            elif rng.random() < 0.4:
                kv.tiers.offload_all()
                kv.tiers.take_copies(step)
        elif coming:
            transit, tokens, first = coming.pop(rng.randrange(len(coming)))
            if rng.random() < 0.2:
                kv.tiers.transits.drop(transit)
            else:
                num_pages = rng.randint(0, len(transit.pages))
                kv.tiers.transits.adopt(transit, pack_tokens(tokens), first, num_pages)
                num_adopted += num_pages > 0
        kv.audit(step)
    assert min(num_adopted, num_lent, num_on_device) > 10
