"""The disk behind the host tier: what is written, what comes back, and who owns it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from minisgl.kvcache.copies import ALWAYS, Copies, LoadRule
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.manager import SPARE_PART, KVCacheManager, Lease, Transit
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.store import Transfer, Way, page_keys


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
    copies = kv.take_copies(step) or Copies()
    kv.commit(lease, key, len(tokens), step)
    for load in copies.loads:
        kv.landed(load.id)
    kv.close(lease)
    kv.settled(step)
    kv.audit(step)
    return copies


def carry_out(
    kv: KVCacheManager, store: MemoryStore, *, num_good: int | None = None
) -> list[range]:
    """Do the transfers, of which `num_good` pages succeed; returns what came of each."""
    results: list[range] = []
    for transfer in kv.take_transfers():
        if transfer.way is Way.WRITE:
            content = [memoryview(b"page") for _ in transfer.keys]
            store.write(transfer.keys, content)
        count = len(transfer.keys) if num_good is None else num_good
        results.append(kv.transferred(transfer.id, count))
    return results


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
        assert not any(carry_out(kv, store))  # nothing is read
    assert set(keys([10, 11, 12])) <= set(store.pages)
    assert store.pages.keys().isdisjoint(keys([120, 121, 122]))
    assert kv._host is not None and kv._host.num_free >= 24 // SPARE_PART
    wanted = pack_tokens([10, 11, 12, 13])
    assert kv.match(wanted, 4) < 3
    fetch = kv.fetch(wanted, 4)
    assert fetch
    kv.audit(12)
    (transfer,) = (found for found in kv.take_transfers() if found.way is Way.READ)
    assert transfer.keys == tuple(keys([10, 11, 12]))[-len(transfer.keys) :]
    assert kv.transferred(fetch, len(transfer.keys)) == range(3 - len(transfer.keys), 3)
    kv.audit(12)
    assert kv.match(wanted, 4) == 3
    assert kv.fetch(wanted, 4) == 0  # nothing is left to read
    copies = run(kv, [10, 11, 12, 13], 13)
    assert set(copies.loads[0].host_pages) >= set(transfer.host_pages)


def test_only_settled_pages_are_written() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=5, num_host_pages=4)
    tokens = [1, 2, 3, 4]
    lease = kv.acquire(pack_tokens(tokens), 4)
    kv.reserve(lease, 4)
    kv.take_copies(1)
    kv.commit(lease, pack_tokens(tokens), 4, 1)
    kv.close(lease)
    other = kv.acquire(pack_tokens([9] * 4), 4)
    kv.reserve(other, 4)
    assert kv.take_copies(2)  # which offloads all four
    kv.take_copies(3)
    assert not kv.take_transfers()
    kv.settled(2)
    kv.take_copies(4)
    assert kv.take_transfers()
    kv.close(other)
    kv.audit(4)


def test_copies_made_ahead_are_written_once_the_device_has_evicted_their_pages() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=33, num_host_pages=2, offloads_per_plan=8)
    run(kv, [1, 2], 1)
    run(kv, list(range(10, 40)), 2)
    assert kv.num_host == 2  # which leaves none of the pages that are to be free
    for step in (3, 4, 5):
        assert not kv.take_copies(step) and not kv.take_transfers()
        kv.settled(step)
        kv.audit(step)
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, 2)
    kv.take_copies(6)
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
    transfers = kv.take_transfers()
    busy = {page for transfer in transfers for page in transfer.host_pages}
    assert busy
    copies = run(kv, [13, 14, 15, 16], 4)
    assert busy.isdisjoint(host_page for _, host_page in copies.offloads)
    for transfer in transfers:
        kv.transferred(transfer.id, 0)  # the disk is full
    kv.audit(4)
    assert not store.pages


def test_a_read_that_no_rank_has_whole_counts_as_far_as_all_have_it() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store)
    wanted = pack_tokens([1, 2, 3, 4, 5])
    assert kv.fetch(wanted, 5)
    assert carry_out(kv, store, num_good=2) == [range(2)]
    kv.audit(0)
    assert kv.match(wanted, 5) == 2
    assert kv.fetch(wanted, 5) == 0  # what failed is not looked for again


def test_a_read_whose_prefix_has_gone_is_given_back() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store, num_pages=5, num_host_pages=2)
    run(kv, [1, 2], 1)
    assert kv.fetch(pack_tokens([1, 2, 3, 4]), 4)
    for step, first in enumerate((10, 20, 30), 2):
        run(kv, [first, first, first, first], step)
    carry_out(kv, store)
    kv.audit(4)
    assert kv.match(pack_tokens([1, 2, 3, 4]), 4) == 0


def test_nothing_is_read_where_computing_is_faster() -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3, 4]), [memoryview(b"page")] * 4)
    kv = make(store, rule=LoadRule(load_s=1.0, compute_s=2.0, delay_s=3.5))
    assert kv.fetch(pack_tokens([1, 2, 3, 4]), 4) == 0  # three pages, of which one is computed
    assert kv.fetch(pack_tokens([1, 2, 3, 4, 5]), 5)
    kv.audit(0)


@pytest.mark.parametrize("namespace", [b"", b"b"])
def test_namespaces_share_nothing_on_disk(namespace: bytes) -> None:
    store = MemoryStore()
    store.write(keys([1, 2, 3], b"a"), [memoryview(b"page")] * 3)
    kv = make(store)
    assert kv.fetch(pack_tokens([1, 2, 3, 4]), 4, namespace) == 0
    assert kv.fetch(pack_tokens([1, 2, 3, 4]), 4, b"a")


def test_everything_can_be_written_at_the_end() -> None:
    store = MemoryStore()
    kv = make(store, num_pages=9)
    run(kv, [1, 2, 3], 1)
    run(kv, [4, 5, 6], 2, b"a")
    kv.offload_all()
    assert kv.take_copies(3)
    kv.settled(3)
    kv.store_all()
    carry_out(kv, store)
    kv.audit(3)
    assert set(store.pages) == {*keys([1, 2, 3]), *keys([4, 5, 6], b"a")}
    kv.store_all()
    assert not kv.take_transfers()


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
    """Beside the audit: every page holds what its tokens say, as copies and transfers move it, to
    and from the disk, and other engines."""
    store = MemoryStore()
    kv = make(store, num_pages, num_host_pages, ALWAYS, page_size, offloads_per_plan)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7 * page_size)
    namespaces = st.sampled_from([b"", b"a"])
    device: dict[int, bytes] = {}  # what each page holds: the key that it should have
    host: dict[int, bytes] = {}
    landing: dict[int, dict[int, bytes]] = {}
    transfers: list[Transfer] = []
    leases: list[Lease] = []
    leaving: list[tuple[Transit, list[bytes]]] = []  # and what its pages should hold
    coming: list[tuple[Transit, Prefix]] = []
    for step in range(1, data.draw(st.integers(1, 30)) + 1):
        if leases and data.draw(st.booleans()):
            kv.close(leases.pop(data.draw(st.integers(0, len(leases) - 1))))
        tokens, namespace = data.draw(prompts), data.draw(namespaces)
        key, count = pack_tokens(tokens), len(tokens)
        named = keys(tokens, namespace, page_size=page_size)
        left = kv.copy_out(key, count, namespace) if data.draw(st.booleans()) else None
        if left is not None:
            leaving.append((left, named[: len(left.host_pages)]))
        lease: Lease | None = None
        if not kv.fetch(key, count, namespace):
            lease = kv.acquire(key, count, namespace)
            if kv.reserve(lease, count) is None:
                kv.close(lease)
                lease = None
        copies = kv.take_copies(step) or Copies()
        for load_id in copies.awaits:
            device |= landing.pop(load_id, {})
        for page, host_page in copies.offloads:
            host[host_page] = device[page]
        for load in copies.loads:
            pairs = zip(load.pages, load.host_pages, strict=True)
            landing[load.id] = {page: host[host_page] for page, host_page in pairs}
            kv.landed(load.id)
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
            expected = kv.expect(num_missing)
            if expected is not None:
                coming.append((expected, Prefix(key, namespace, first, named[first:])))
        while coming and data.draw(st.booleans()):
            transit, prefix = coming.pop(data.draw(st.integers(0, len(coming) - 1)))
            num_come = data.draw(st.integers(0, len(transit.host_pages)))
            host |= dict(zip(transit.host_pages[:num_come], prefix.named, strict=False))
            kv.adopt(transit, prefix.key, prefix.first, num_come, prefix.namespace)
        while leaving and data.draw(st.booleans()):
            transit, content = leaving.pop(data.draw(st.integers(0, len(leaving) - 1)))
            assert kv.is_written(transit, step)
            assert [host[page] for page in transit.host_pages] == content
            kv.drop(transit)
        transfers += kv.take_transfers()
        while transfers and data.draw(st.booleans()):
            transfer = transfers.pop(data.draw(st.integers(0, len(transfers) - 1)))
            num_done = data.draw(st.integers(0, len(transfer.keys)))
            for name, host_page in list(zip(transfer.keys, transfer.host_pages, strict=True)):
                if transfer.way is Way.WRITE:
                    assert host[host_page] == name
                else:
                    host[host_page] = name
            if transfer.way is Way.WRITE:
                store.write(transfer.keys, [memoryview(b"page") for _ in transfer.keys])
            kv.transferred(transfer.id, num_done)
        kv.audit(step)
    for lease in leases:
        kv.close(lease)
    for transfer in transfers:
        kv.transferred(transfer.id, 0)
    kv.settled(1 << 40)
    for _ in range(100):
        if kv.take_copies(1 << 29) is None:
            break
        for transfer in kv.take_transfers():
            kv.transferred(transfer.id, 0)
    else:
        raise AssertionError("it copies for ever")
    kv.audit(1 << 30)
