"""Pages of windowed layers behind the device: which go there, and what comes back."""

from __future__ import annotations

import pytest
from support.memory_store import MemoryStore

from minisgl.config import WindowSizes
from minisgl.kvcache.copies import Copies, Load
from minisgl.kvcache.disk import Disk
from minisgl.kvcache.lease import Lease
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_keys import key_beside, page_keys
from minisgl.kvcache.prefix import TOKEN_BYTES, pack_tokens
from minisgl.kvcache.windows import Windows

NUM_PAGES, WINDOW = 41, 4  # of one token each: a query sees the three pages before its own


class WindowedCache(KVCacheManager):
    windows: Windows


def make(
    *,
    num_window_pages: int = 60,
    spare: int = 20,
    pages_each: int = 1,
    store: MemoryStore | None = None,
    looks_ahead: bool = False,
) -> WindowedCache:
    sizes = WindowSizes(window=WINDOW, page_size=1, in_flight=1, spare=spare, pages_each=pages_each)
    return WindowedCache(
        num_pages=NUM_PAGES,
        page_size=1,
        cache_type="radix",
        num_host_pages=200,
        num_window_pages=num_window_pages,
        window_sizes=sizes,
        looks_ahead=looks_ahead,
        disk=None if store is None else Disk(store, b"model"),
    )


def begin(kv: WindowedCache, tokens: list[int]) -> Lease:
    lease = kv.acquire(pack_tokens(tokens), len(tokens))
    assert kv.reserve(lease, len(tokens)) is not None
    return lease


def run(kv: WindowedCache, prompt: list[int], step: int, answer: list[int] | None = None) -> Copies:
    """Compute a prompt and an answer; returns what its plan has copied."""
    lease, key = begin(kv, prompt), pack_tokens(prompt)
    copies = kv.tiers.take_copies(step) or Copies()
    for load in copies.loads:
        kv.loads.landed(load.id)
    assert lease.windows is not None
    kv.windows.cover(lease.windows, len(lease.pages))
    kv.commit(lease, key, len(prompt), step)
    whole = [*prompt, *(answer or [])]
    assert kv.reserve(lease, len(whole)) is not None
    kv.windows.cover(lease.windows, len(lease.pages))
    kv.close(lease, pack_tokens(whole), len(whole), step)
    kv.settled(step)
    kv.audit(step)
    return copies


def offload_all(kv: WindowedCache, step: int) -> Copies:
    kv.tiers.offload_all()
    copies = kv.tiers.take_copies(step) or Copies()
    kv.settled(step)
    kv.audit(step)
    return copies


def num_windowed(copies: Copies) -> int:
    return sum(page >= NUM_PAGES for page, _ in copies.offloads)


def load_of(kv: WindowedCache, tokens: list[int], step: int) -> tuple[Load, int]:
    """What a lease on a prompt loads, and how many tokens it finds."""
    lease = begin(kv, tokens)
    copies = kv.tiers.take_copies(step)
    assert copies is not None and kv.is_loading(lease)
    (load,) = copies.loads
    kv.audit(step)
    kv.loads.landed(load.id)
    found = lease.num_committed
    kv.close(lease)
    kv.audit(step)
    return load, found


PROMPT = list(range(20))
ANSWER = [90, 91, 92, 93, 94, 95]
TURN = [*PROMPT, *ANSWER, 80, 81, 82, 83, 84, 85, 86]


@pytest.mark.parametrize("pages_each", [1, 3])
def test_what_the_ends_of_a_prompt_and_its_answer_see_goes_to_host_memory(pages_each: int) -> None:
    kv = make(pages_each=pages_each)
    run(kv, PROMPT, 1, ANSWER)
    copies = offload_all(kv, 2)
    assert num_windowed(copies) == pages_each * 2 * (WINDOW - 1)
    assert len(copies.offloads) - num_windowed(copies) == 26
    for prompt, found in ((PROMPT, 19), (TURN, 26)):
        load, num_found = load_of(kv, prompt, 3)
        assert num_found == found
    # The device has the prompt then; the windows of the prompt's end were loaded before.
    assert len(load.pages) == 26 - 19 + pages_each * (WINDOW - 1)


def test_the_ends_of_a_turn_are_passed_once_the_next_one_has_begun() -> None:
    kv = make()
    run(kv, PROMPT, 1, ANSWER)
    run(kv, TURN, 2, [70, 71])
    assert num_windowed(offload_all(kv, 3)) == 2 * (WINDOW - 1)
    assert kv.match(pack_tokens([*TURN, 70, 71, 1]), len(TURN) + 3) == len(TURN) + 2
    assert kv.match(pack_tokens(TURN), len(TURN)) == len(TURN) - 1
    assert kv.match(pack_tokens(PROMPT), len(PROMPT)) == 0


def test_where_two_prompts_part_others_may_go_on() -> None:
    kv = make()
    for step, last in enumerate((30, 40, 50), 1):
        run(kv, [*PROMPT, *range(last, last + 9)], step)
    offload_all(kv, 4)
    assert kv.match(pack_tokens([*PROMPT, 1, 2]), 22) == 20
    assert kv.match(pack_tokens([*PROMPT[:15], 1, 2]), 17) == 0


def test_windows_alone_come_back_where_the_device_has_lost_them() -> None:
    kv = make()
    run(kv, PROMPT, 1)
    offload_all(kv, 2)
    load_of(kv, PROMPT, 3)
    full_pages = [page for run in kv._cache.pages.values() for page in run]
    kv.windows.forget(full_pages)
    load, found = load_of(kv, PROMPT, 4)
    assert found == 19 and [page >= NUM_PAGES for page in load.pages] == [True] * (WINDOW - 1)
    copies = offload_all(kv, 5)
    assert not copies.offloads, "what came from there is there"


def test_requests_wait_for_windows_that_others_load() -> None:
    kv = make()
    run(kv, PROMPT, 1)
    offload_all(kv, 2)
    load_of(kv, PROMPT, 3)
    kv.windows.forget([page for run in kv._cache.pages.values() for page in run])
    first, second = begin(kv, PROMPT), begin(kv, PROMPT)
    copies = kv.tiers.take_copies(4)
    assert copies is not None and len(copies.loads) == 1
    assert kv.is_loading(first) and kv.is_loading(second) and not second.loaded
    kv.close(first)
    kv.audit(4)
    kv.loads.landed(copies.loads[0].id)
    assert not kv.is_loading(second)
    kv.close(second)
    kv.audit(4)


def test_a_load_that_nobody_wants_gives_its_windows_to_whoever_needs_them() -> None:
    kv = make(num_window_pages=1 + 20 + 2 * (WINDOW + 1))
    run(kv, PROMPT, 1)
    offload_all(kv, 2)
    aborted = begin(kv, PROMPT)
    copies = kv.tiers.take_copies(3)
    assert copies is not None
    kv.close(aborted)
    lease = begin(kv, [7] * 20)
    assert lease.windows is not None
    room = kv.windows.room(lease.windows)
    kv.windows.cover(lease.windows, min(room, 20))
    while kv.windows._pool.num_free:
        kv.windows._pool.take(1)
    kv.windows._take(1)
    awaited = kv.tiers.take_copies(4)
    assert awaited is not None and awaited.awaits == (copies.loads[0].id,)


def test_a_load_waits_while_chunks_of_its_plan_have_the_windows_that_are_left() -> None:
    kv, prompt, other = (
        make(num_window_pages=1 + 4 + 2 * (WINDOW + 1), spare=4),
        PROMPT[:12],
        [7] * 18,
    )
    run(kv, prompt, 1)
    offload_all(kv, 2)
    lease = begin(kv, other)
    assert lease.windows is not None
    kv.windows.cover(lease.windows, kv.windows.room(lease.windows))
    waiting = kv.acquire(pack_tokens(prompt), 12)
    assert waiting.must_load and kv.reserve(waiting, 12) is None
    kv.close(waiting)
    kv.tiers.take_copies(3)
    kv.commit(lease, pack_tokens(other), 14, 3)
    load, found = load_of(kv, prompt, 4)
    assert (len(load.pages), found) == (11 + WINDOW - 1, 11)
    kv.close(lease)


def test_short_prompts_go_to_host_memory_before_their_windows_are_lost() -> None:
    """Of which the device has more than windowed pages for their ends."""
    kv = make(num_window_pages=1 + 4 + 2 * (WINDOW + 1), spare=4)
    prompts = [list(range(first, first + 6)) for first in range(0, 60, 10)]
    for step, prompt in enumerate(prompts, 1):
        run(kv, prompt, step)
    assert [kv.match(pack_tokens(prompt), 6) for prompt in prompts] == [5] * len(prompts)
    assert kv.num_free > 0


def test_pages_that_no_end_needs_make_way_before_older_ones_that_one_needs() -> None:
    kv = make(num_window_pages=1 + 20 + WINDOW + 1)
    run(kv, PROMPT, 1)
    run(kv, list(range(30, 49)), 2)
    assert kv.match(pack_tokens(PROMPT), 20) == 19
    assert kv.match(pack_tokens(list(range(30, 49))), 19) == 18


@pytest.mark.parametrize("pages_each", [1, 3])
@pytest.mark.parametrize("lost", [None, 1, 2, 3])
def test_windows_come_back_from_disk_if_all_of_them_are_there(
    lost: int | None, pages_each: int
) -> None:
    store = MemoryStore()
    kv = make(store=store, pages_each=pages_each)
    run(kv, PROMPT, 1)
    offload_all(kv, 2)
    assert kv.disk is not None
    kv.disk.store_all()
    of_pages = []
    for move in kv.moves.take():
        store.write(move.keys, [memoryview(b"page") for _ in move.keys])
        kv.moves.end(move.id, len(move.keys))
        of_pages += move.pages
    again = make(store=store, pages_each=pages_each)
    if lost is not None:  # of what pages have beside them, but the last one
        around = [*kv.tiers.host.pool.beside.items()]
        assert len(around) == 3 + 1
        *_, host_page = around[lost][1].values()
        name = [*store.pages][of_pages.index(host_page)]
        store.forget([name])
    assert again.disk is not None
    began = again.disk.read(pack_tokens(PROMPT), 20)
    assert began == (lost is None)
    for move in again.moves.take():
        again.moves.end(move.id, len(move.keys))
    again.audit(0)
    if began:
        load, found = load_of(again, PROMPT, 1)
        assert found == 19 and len(load.pages) == 19 + pages_each * (WINDOW - 1)


def stored(prompts: list[tuple[list[int], list[int]]], *, looks_ahead: bool = False) -> MemoryStore:
    """A disk with all that these prompts and answers leave."""
    store = MemoryStore()
    kv = make(store=store, looks_ahead=looks_ahead)
    for step, (prompt, answer) in enumerate(prompts, 1):
        run(kv, prompt, step, answer)
    offload_all(kv, len(prompts) + 1)
    assert kv.disk is not None
    kv.disk.store_all()
    for move in kv.moves.take():
        store.write(move.keys, [memoryview(b"page") for _ in move.keys])
        kv.moves.end(move.id, len(move.keys))
    return store


@pytest.mark.parametrize("num_come", [0, 1, 18, 19, 22, 26, 27, 28])
def test_where_a_part_of_a_read_comes_a_request_goes_on_behind_a_shorter_one(num_come: int) -> None:
    """Of 26 pages and three of windows: behind the prompt, if its pages are there."""
    kv = make(store=stored([(PROMPT, ANSWER)]))
    come: list[range] = []
    assert kv.disk is not None
    assert kv.disk.read(pack_tokens(TURN), len(TURN), ended=come.append)
    (move,) = kv.moves.take()
    assert len(move.keys) == 26 + WINDOW - 1
    kv.moves.end(move.id, num_come)
    kv.audit(0)
    found = 19 if num_come >= 19 else 0
    rest = kv.moves.take()
    assert len(rest) == bool(found) and len(come) == (not found)
    for move in rest:  # the pages that have windows beside them, and these
        assert len(move.keys) == 2 * (WINDOW - 1)
        kv.moves.end(move.id, len(move.keys))
    kv.audit(0)
    assert come == [range(min(num_come, 26))] and not kv.moves.take()
    assert kv.match(pack_tokens(TURN), len(TURN)) == found
    if found:
        assert load_of(kv, TURN, 1)[1] == found
    run(kv, TURN, 2)  # on what has come alone, too
    assert kv.match(pack_tokens(TURN), len(TURN)) == len(TURN) - 1
    assert num_windowed(offload_all(kv, 3)) > 0


def test_where_the_last_page_is_spared_the_windows_behind_the_one_before_come_back() -> None:
    kv = make(looks_ahead=True)
    run(kv, PROMPT, 1, ANSWER)
    offload_all(kv, 2)
    for prompt, found in ((PROMPT, 18), (TURN, 25)):
        assert load_of(kv, prompt, 3)[1] == found
    for lost, found in ((26, 25), (22, 18)):  # the windows beside it
        store = stored([(PROMPT, ANSWER)], looks_ahead=True)
        *_, page = page_keys(b"model", b"", pack_tokens(TURN), TOKEN_BYTES, 0, lost + 1)
        store.forget([key_beside(page, 0)])
        again = make(store=store, looks_ahead=True)
        assert again.disk is not None and again.disk.read(pack_tokens(TURN), len(TURN))
        (move,) = again.moves.take()
        assert all(map(store.holds, move.keys))
        again.moves.end(move.id, len(move.keys))
        again.audit(0)
        assert not again.disk.read(pack_tokens(TURN), len(TURN))
        assert load_of(again, TURN, 1)[1] == found
