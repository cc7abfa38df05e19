"""The KV cache against a trivially simple model of it."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.folders import ROOT

from minisgl.kvcache.copies import ALWAYS
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.tree import Node, PrefixTree


def make(num_pages: int = 64, page_size: int = 4, cache_type: str = "radix") -> KVCacheManager:
    return KVCacheManager(num_pages=num_pages, page_size=page_size, cache_type=cache_type)


def run_once(kv: KVCacheManager, tokens: list[int], step: int = 1, namespace: bytes = b"") -> Lease:
    """Runs one request: lease, reserve, compute, commit. The caller closes the lease."""
    key = pack_tokens(tokens)
    lease = kv.acquire(key, len(tokens), namespace)
    assert kv.reserve(lease, len(tokens)) is not None
    kv.commit(lease, key, len(tokens), step)
    return lease


def cached_tokens(kv: KVCacheManager, tokens: list[int], namespace: bytes = b"") -> int:
    return kv.match(pack_tokens(tokens), len(tokens), namespace)


def test_a_second_request_matches_the_pages_of_the_first() -> None:
    kv = make(page_size=4)
    first = run_once(kv, list(range(10)))
    second = kv.acquire(pack_tokens(list(range(10))), 10)
    assert second.pages == first.pages[:2]
    kv.audit(1)
    kv.close(first)
    kv.close(second)
    kv.audit(1)


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_match_leaves_one_token_to_compute(page_size: int, extra: int) -> None:
    kv = make(page_size=page_size)
    tokens = list(range(3 * page_size + 1))
    kv.close(run_once(kv, tokens))
    prompt = [*range(2 * page_size + extra)]
    assert cached_tokens(kv, prompt) == (len(prompt) - 1) // page_size * page_size


def test_concurrent_equal_prompts_keep_separate_pages_that_are_freed_once() -> None:
    kv = make(num_pages=16, page_size=2)
    key = pack_tokens([1, 2, 3, 4, 5])
    leases = [kv.acquire(key, 5) for _ in range(3)]
    for lease in leases:
        assert not lease.pages
        kv.reserve(lease, 5)
    for lease in leases:
        kv.commit(lease, key, 5, 1)
        kv.audit(1)
    assert [len(lease.owned) for lease in leases] == [1, 3, 3]
    kv.close(leases[0])
    # The others hold none of the cache's pages, only equal ones of their own.
    assert kv.num_cached == 2
    for lease in leases[1:]:
        kv.close(lease, key, 5, 1)
        kv.audit(1)
    assert (kv.num_free, kv.num_cached) == (13, 2)


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    kv = make(num_pages=9, page_size=1)
    old, new = [1, 2, 3], [1, 2, 4]
    kv.close(run_once(kv, [*old, 0]))
    kv.close(run_once(kv, [*new, 0]))
    kv.close(kv.acquire(pack_tokens([*old, 0, 0]), 5))  # used again
    lease = kv.acquire(b"", 1)
    kv.reserve(lease, kv.num_free + 1)
    assert cached_tokens(kv, [*new, 0, 0]) == 3  # lost its tail only
    kv.reserve(lease, len(lease.pages) + 1)
    assert cached_tokens(kv, [*new, 0, 0]) == 2
    assert cached_tokens(kv, [*old, 0, 0]) == 4
    kv.audit(1)


def test_locked_pages_are_never_evicted() -> None:
    kv = make(num_pages=9, page_size=1)
    locked = run_once(kv, [1, 2, 3, 4])
    other = kv.acquire(b"", 1)
    assert kv.num_available == 4
    assert kv.reserve(other, 5) is None
    assert kv.reserve(other, 4) is not None
    kv.audit(1)
    kv.close(locked)
    assert kv.reserve(other, 5) is not None
    kv.audit(1)


def test_the_naive_cache_shares_no_pages() -> None:
    kv = make(cache_type="naive")
    lease = run_once(kv, list(range(20)))
    assert cached_tokens(kv, list(range(20))) == 0
    kv.audit(1)
    kv.close(lease)
    assert kv.num_free == 63
    kv.audit(1)


def test_pages_written_by_a_failed_step_are_not_reused() -> None:
    kv = make(page_size=2)
    good = run_once(kv, [1, 2, 3, 4], step=1)
    bad = run_once(kv, [1, 2, 3, 4, 5, 6, 7, 8], step=2)
    kv.close(bad)
    kv.drop_written_since(2)
    assert cached_tokens(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    kv.close(good)
    kv.audit(2)


def test_namespaces_share_no_pages() -> None:
    kv = make(page_size=2)
    tokens = [1, 2, 3, 4, 5]
    for namespace in (b"", b"a", b"b"):
        assert cached_tokens(kv, tokens, namespace) == 0
        lease = run_once(kv, tokens, namespace=namespace)
        assert lease.owned == lease.pages[2:]
        kv.close(lease, pack_tokens(tokens), 5, 1)
        kv.audit(1)
        assert cached_tokens(kv, tokens, namespace) == 4
    assert kv.num_cached == 6


def test_the_least_recently_used_leaf_of_all_namespaces_is_evicted_first() -> None:
    kv = make(num_pages=7, page_size=1)
    for namespace in (b"a", b"", b"b"):
        kv.close(run_once(kv, [1, 2], namespace=namespace))
    kv.close(kv.acquire(pack_tokens([1, 2, 3]), 3, b"a"))  # used again
    lease = kv.acquire(b"", 1)
    for needed, left in ((2, [2, 0, 2]), (4, [2, 0, 0]), (6, [0, 0, 0])):
        kv.reserve(lease, needed)
        assert [cached_tokens(kv, [1, 2, 3], ns) for ns in (b"a", b"", b"b")] == left
        kv.audit(1)


def test_evicting_a_namespace_removes_all_traces_of_it() -> None:
    """A client may send a fresh salt each time, whether its prompts fill a page or not."""
    kv = make(num_pages=32, page_size=4)
    for index in range(2000):
        namespace = index.to_bytes(4, "big")
        assert cached_tokens(kv, list(range(9)), namespace) == 0
        for length in (3, 9):
            tokens = list(range(length))
            lease = run_once(kv, tokens, namespace=namespace)
            kv.close(lease, pack_tokens(tokens), length, 1)
        assert len(kv._cache.tree._roots) <= 31
        assert len(kv._cache._heap) <= 64 + 2 * 31
    kv.audit(1)
    kv.drop_written_since(0)
    assert not kv._cache.tree._roots
    assert kv.num_free == 31


def test_a_cache_of_the_device_alone_has_no_tiers_and_no_groups() -> None:
    """What is off is not there: nothing follows the tree but the pages on the device."""
    kv = make()
    assert kv._cache.tree.followers == [kv._cache] and not kv._groups
    assert kv.disk is None
    with pytest.raises(AssertionError, match="no host memory"):
        _ = kv.tiers


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("tree", {"prefix"}),
        ("residency", {"page_pool", "tree"}),
        ("radix", {"copies", "lease", "page_pool", "residency", "tree"}),
    ],
)
def test_the_tree_knows_no_memory_and_the_device_none_behind_it(
    module: str, known: set[str]
) -> None:
    source = (ROOT / f"minisgl/kvcache/{module}.py").read_text()
    assert set(re.findall(r"^from minisgl\.kvcache\.(\w+) import", source, re.MULTILINE)) == known


def test_a_request_can_opt_out_of_prefix_reuse() -> None:
    kv = make(page_size=2)
    kv.close(run_once(kv, [1, 2, 3, 4]))
    lease = kv.acquire(pack_tokens([1, 2, 3, 4]), 4, reuse=False)
    assert not lease.pages
    kv.close(lease)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv, lease: kv._cache.pool.free_pages.append(lease.pages[0]),
        lambda kv, lease: kv._cache.pool.free_pages.pop(),
        lambda kv, lease: lease.pages.append(lease.pages[-1]),
        lambda kv, lease: setattr(lease.node, "num_users", lease.node.num_users + 1),
        lambda kv, lease: kv._cache.pool.written_by.__setitem__(lease.pages[0], 99),
        lambda kv, lease: setattr(kv._cache, "num_evictable", 3),
        lambda kv, lease: kv._cache.tree._roots.update(
            {b"x": Node(key=b"x", num_pages=0, parent=None)}
        ),
        lambda kv, lease: kv._cache.tree._roots.update({b"x": kv._cache.tree._roots.pop(b"")}),
    ],
)
def test_the_audit_detects_every_kind_of_damage(damage: object) -> None:
    kv = make(page_size=2)
    lease = run_once(kv, [1, 2, 3, 4, 5])
    kv.audit(1)
    damage(kv, lease)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        kv.audit(1)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(4, 40))
def test_any_sequence_of_leases_keeps_every_page_accounted_for(
    data: st.DataObject, page_size: int, num_pages: int
) -> None:
    kv = make(num_pages, page_size)
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6 * page_size)
    namespaces = st.sampled_from([b"", b"a", b"b"])
    seen: set[tuple[bytes, tuple[int, ...]]] = set()  # page-aligned prefixes ever committed
    leases: list[tuple[Lease, list[int], bytes]] = []
    for step in range(1, data.draw(st.integers(1, 25)) + 1):
        if leases and data.draw(st.booleans()):
            lease, tokens, namespace = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
            if data.draw(st.booleans()):
                seen |= {
                    (namespace, tuple(tokens[:end]))
                    for end in range(page_size, len(tokens) + 1, page_size)
                }
                kv.close(lease, pack_tokens(tokens), len(tokens), step)
            else:
                kv.close(lease)
        else:
            tokens, namespace = data.draw(prompts), data.draw(namespaces)
            key = pack_tokens(tokens)
            expected = kv.match(key, len(tokens), namespace)
            lease = kv.acquire(key, len(tokens), namespace)
            assert len(lease.pages) * page_size == expected < len(tokens)
            assert not expected or (namespace, tuple(tokens[:expected])) in seen
            kv.audit(step)
            if kv.reserve(lease, len(tokens)) is None:
                kv.close(lease)
            else:
                leases.append((lease, tokens, namespace))
                half = len(tokens) // 2
                kv.commit(lease, key, half, step)
                seen |= {
                    (namespace, tuple(tokens[:end]))
                    for end in range(page_size, half + 1, page_size)
                }
        kv.audit(step)
    for lease, _, _ in leases:
        kv.close(lease)
    kv.audit(1 << 30)
    assert kv.num_available == num_pages - 1
    everything = kv.acquire(b"", 1)
    assert kv.reserve(everything, (num_pages - 1) * page_size) is not None
    kv.audit(1 << 30)


def test_matching_and_eviction_visit_only_their_own_path() -> None:
    """The cost of a step must not grow with the cache: count the nodes that are looked at."""
    page_size, rng = 4, random.Random(0)

    def visits(num_prompts: int) -> tuple[int, int]:
        tree = PrefixTree(page_size)
        cache = RadixCache(tree, PagePool(1), ALWAYS)
        for index in range(num_prompts):
            tokens = [index, *(rng.randrange(9) for _ in range(39))]
            match = cache.acquire(pack_tokens(tokens), 10)
            pages = range(index * 10, index * 10 + 10)
            cache.insert(match.node, pack_tokens(tokens), 0, pages)
            tree.release(match.node)
        lookups = _count_calls(tree, "child", lambda: cache.match_pages(pack_tokens(tokens), 10))
        removals = _count_calls(cache, "_is_fresh", lambda: cache.evict(20))
        return lookups, removals

    assert visits(10) == visits(1000)


def _count_calls(owner: PrefixTree | RadixCache, name: str, action: object) -> int:
    calls = 0
    original = getattr(owner, name)

    def counting(*args: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args)

    setattr(owner, name, counting)
    action()  # type: ignore[operator]
    delattr(owner, name)
    return calls
