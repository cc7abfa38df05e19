"""Pages of windowed layers: what a request keeps of them, and what the cache can still match."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import WindowSizes
from minisgl.kvcache.lease import Lease, WindowPages
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.prefix import pack_tokens
from minisgl.kvcache.windows import Windows


class WindowedCache(KVCacheManager):
    windows: Windows


def make(
    window: int,
    page_size: int,
    num_window_pages: int = 100,
    *,
    num_pages: int = 100,
    spare: int = 4,
) -> WindowedCache:
    sizes = WindowSizes(window=window, page_size=page_size, in_flight=1, spare=spare)
    return WindowedCache(
        num_pages=num_pages,
        page_size=page_size,
        cache_type="radix",
        num_window_pages=num_window_pages,
        window_sizes=sizes,
    )


def windows_of(lease: Lease) -> WindowPages:
    assert lease.windows is not None
    return lease.windows


def begin(kv: WindowedCache, tokens: list[int]) -> Lease:
    """A lease with the pages for a prompt, whose only chunk is planned."""
    lease = kv.acquire(pack_tokens(tokens), len(tokens))
    assert kv.reserve(lease, len(tokens)) is not None
    kv.windows.cover(windows_of(lease), len(lease.pages))
    return lease


def run(kv: WindowedCache, tokens: list[int], step: int = 1) -> None:
    key, lease = pack_tokens(tokens), begin(kv, tokens)
    kv.commit(lease, key, len(tokens), step)
    kv.close(lease, key, len(tokens) - 1, step)
    kv.audit(step)


def full_pages(kv: WindowedCache, tokens: list[int], num_pages: int) -> list[int]:
    """The pages of full layers that the cache has of a prompt."""
    found = kv._cache.tree.match(pack_tokens(tokens), num_pages)
    return [page for node, common in found for page in kv._cache.pages[node][:common]]


def cached(kv: WindowedCache, tokens: list[int]) -> int:
    return kv.match(pack_tokens(tokens), len(tokens))


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_the_first_page_that_a_query_sees(window: int, page_size: int) -> None:
    sizes = WindowSizes(window=window, page_size=page_size, in_flight=1, spare=0)
    for num_pages in range(20):
        position = num_pages * page_size
        seen = range(max(0, position - window + 1), position + 1)
        assert sizes.first_seen(num_pages) == seen[0] // page_size


def test_a_request_keeps_the_pages_of_its_window_only() -> None:
    kv = make(window=6, page_size=2)
    tokens = list(range(40))
    lease = begin(kv, tokens)
    kv.commit(lease, pack_tokens(tokens), 40, 1)
    held = windows_of(lease)
    # Two pages at the end may have tokens in flight; the first query behind them sees five more.
    assert (held.first, held.end) == ((36 - 5) // 2, 20)
    assert len(held.pages) == kv.windows.sizes.span == 5
    kv.audit(1)


@pytest.mark.parametrize("length", range(1, 20))
def test_a_prefix_is_matched_where_the_pages_of_its_window_are_left(length: int) -> None:
    """All pages of a prompt stay in the cache until others need the room; then the last remain."""
    window, page_size = 5, 2
    kv = make(window, page_size, num_window_pages=100)
    prompt = list(range(21))
    run(kv, prompt)
    prefix = [*prompt[:length], 99, 98]
    assert cached(kv, prefix) == length // page_size * page_size
    kv.windows.forget(full_pages(kv, prompt, 4))  # tokens 0 .. 7
    # Behind token 12, the next query sees tokens 8 to 12.
    whole = length // page_size * page_size
    assert cached(kv, prefix) == (whole if whole - window + 1 >= 8 else 0)


def test_the_least_recently_used_pages_make_way() -> None:
    kv = make(window=4, page_size=2, num_window_pages=1 + 12)
    first, second = list(range(9)), list(range(20, 29))
    run(kv, first)
    run(kv, second)
    assert (cached(kv, first), cached(kv, second)) == (8, 8)
    kv.close(begin(kv, [*first, 1]))  # uses the end of the first
    run(kv, list(range(40, 57)))
    assert (cached(kv, first), cached(kv, second)) == (8, 0)


def test_pages_of_a_request_stay_where_the_cache_has_them() -> None:
    kv = make(window=4, page_size=2, num_window_pages=1 + 12)
    first, second = list(range(9)), list(range(20, 29))
    run(kv, first)
    holder = begin(kv, [*first, 1])
    used = list(windows_of(holder).pages)
    run(kv, second)
    run(kv, list(range(40, 57)))
    assert windows_of(holder).pages == used
    assert cached(kv, second) == 0
    kv.close(holder)
    kv.audit(1)
    assert cached(kv, first) == 8


def test_a_prefix_whose_windows_are_gone_gets_them_back() -> None:
    kv = make(window=4, page_size=2)
    prompt = list(range(13))
    run(kv, prompt)
    kv.windows.forget(full_pages(kv, prompt, 6))
    assert cached(kv, prompt) == 0
    run(kv, prompt, step=2)
    assert cached(kv, prompt) == 12
    assert kv.num_cached == 6, "a prefix is there twice"


def test_pages_that_a_failed_step_wrote_are_not_matched() -> None:
    """Also where the pages of full layers beside them are older."""
    kv = make(window=4, page_size=2)
    prompt = list(range(13))
    run(kv, prompt)
    kv.windows.forget(full_pages(kv, prompt, 6))
    run(kv, prompt, step=2)
    kv.drop_written_since(2)
    kv.audit(2)
    assert cached(kv, prompt) == 0
    assert len(full_pages(kv, prompt, 6)) == 6
    assert len(kv.windows._cached) == 0


def test_pages_leave_with_the_prefix_that_they_belong_to() -> None:
    kv = make(window=4, page_size=2, num_pages=11)
    run(kv, list(range(13)))
    assert len(kv.windows._cached) == 6
    run(kv, list(range(20, 37)))
    assert cached(kv, list(range(13))) == 2
    assert len(kv.windows._cached) == 1 + 8


def test_requests_wait_for_the_claims_of_others() -> None:
    kv = make(window=4, page_size=2, num_window_pages=1 + 10, spare=2)
    span = kv.windows.sizes.span
    assert span == 4
    first = kv.acquire(pack_tokens([1] * 8), 8)
    assert kv.reserve(first, 8) is not None
    second = kv.acquire(pack_tokens([2] * 8), 8)
    assert kv.reserve(second, 8) is not None  # 8 of 10 pages are claimed
    third = kv.acquire(pack_tokens([3]), 1)
    assert kv.reserve(third, 1) is None
    assert kv.windows.room(windows_of(second)) == 2 * (span + 2)
    kv.windows.cover(windows_of(second), 6)
    assert kv.windows.room(windows_of(first)) == 2 * span
    kv.close(third)
    kv.close(second)
    kv.close(first)
    assert kv.windows._pool.num_free == 10


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_leases_see_what_was_computed_and_no_page_is_lost(seed: int) -> None:
    """Against a model that knows what each page holds: the tokens up to its end."""
    rng = random.Random(seed)
    page_size, window = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 7])
    spare = rng.randint(1, 5)
    sizes = WindowSizes(window=window, page_size=page_size, in_flight=1, spare=spare)
    num_window_pages = 1 + sizes.span + spare + rng.randint(0, 20)
    kv = make(window, page_size, num_window_pages, num_pages=rng.randint(30, 60), spare=spare)
    holds: dict[int, tuple[int, ...]] = {}
    running: list[tuple[Lease, list[int], int]] = []  # with the number of computed tokens
    step = 0
    for _ in range(60):
        step += 1
        if rng.random() < 0.3:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            lease = kv.acquire(pack_tokens(tokens), len(tokens))
            held = windows_of(lease)
            done = len(lease.pages) * page_size
            assert held.first == sizes.first_seen(len(lease.pages))
            for column, page in enumerate(held.pages, held.first):
                assert holds[page] == tuple(tokens[: (column + 1) * page_size])
            if kv.reserve(lease, len(tokens)) is None:
                kv.close(lease)
            else:
                running.append((lease, tokens, done))
        elif running and rng.random() < 0.6:
            lease, tokens, done = running.pop(rng.randrange(len(running)))
            held = windows_of(lease)
            end = min(done + rng.randint(1, 9), len(tokens), max(done, kv.windows.room(held)))
            kv.windows.cover(held, -(-end // page_size))
            for column in range(done // page_size, -(-end // page_size)):
                holds[held.pages[column - held.first]] = tuple(tokens[: (column + 1) * page_size])
            for column in range(max(0, done - window + 1) // page_size, -(-end // page_size)):
                page = held.pages[column - held.first]
                assert holds[page] == tuple(tokens[: (column + 1) * page_size]), "it was given up"
            if end > done:
                kv.commit(lease, pack_tokens(tokens), end, step)
            running.append((lease, tokens, end))
        elif running:
            lease, tokens, done = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.8:
                kv.close(lease, pack_tokens(tokens[:done]), done, step)
            else:
                kv.close(lease)
        kv.audit(step)
    for lease, *_ in running:
        kv.close(lease)
    kv.audit(step)
    assert kv.num_available == kv.num_pages - 1
    assert kv.windows._pool.num_free + len(kv.windows._cached) == num_window_pages - 1
