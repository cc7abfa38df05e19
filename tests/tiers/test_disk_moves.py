"""Moves between host pages and the disk, beside the copies of plans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.host_copy_cases import cache_of, holds, numbering_of, write
from support.slow_lanes import SlowLane

from minisgl.config import EngineConfig
from minisgl.device.lanes import Lanes
from minisgl.errors import ConfigError
from minisgl.kvcache.copies import Copies, Load, LoadRule
from minisgl.kvcache.moves import Move, Place
from minisgl.ranks.processes.fewest_pages import FewestPages
from minisgl.ranks.processes.plan_codec import MOVE, packed, unpacked
from minisgl.tiers.disk import disk_moves
from minisgl.tiers.disk.page_files import PageFiles
from minisgl.tiers.tiers import Tiers

CPU = torch.device("cpu")
PAGE_BYTES = 4 * 2 * 16 * 4 * 6  # of support.host_copy_cases
KEYS = tuple(bytes([index]) * 32 for index in range(30))
Ends = queue.SimpleQueue[tuple[int, int]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Of all slow lanes."""
    gate = threading.Event()
    monkeypatch.setattr(SlowLane, "gate", gate)
    return gate


def make(folder: Path) -> Tiers:
    store = PageFiles(folder, bytes(32), PAGE_BYTES, 1 << 30)
    return Tiers(kv := cache_of(CPU), 12, numbering_of(kv), Lanes(CPU), SlowLane, store)


def test_transfers_wait_for_the_copies_of_their_pages(
    tmp_path: Path, gate: threading.Event
) -> None:
    kv, ends = cache_of(CPU), Ends()
    store = PageFiles(tmp_path, bytes(32), PAGE_BYTES, 1 << 30)
    cache = Tiers(kv, 12, numbering_of(kv), Lanes(CPU), SlowLane, store)

    def move(*moves: Move) -> None:
        cache.move(moves, lambda *end: ends.put(end))

    write(kv, 1, 5.0)
    write(kv, 2, 6.0)
    cache.copies.queue(Copies(offloads=((1, 3), (2, 4))))
    move(Move(1, Place.HOST, Place.DISK, (4, 3), KEYS[:2]))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    gate.set()
    assert ends.get() == (1, 2)
    gate.clear()
    cache.copies.queue(Copies(loads=(Load(1, (3,), (7,)),)))()
    move(Move(2, Place.DISK, Place.HOST, (3,), KEYS[:1]))  # overwrites what is being loaded
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    gate.set()
    assert ends.get() == (2, 1)
    cache.copies.queue(Copies(loads=(Load(2, (3,), (8,)),)))()[2].wait()
    assert holds(kv, 7, 5.0) and holds(kv, 8, 6.0)
    traffic = cache.traffic()
    assert (traffic.writes.num_pages, traffic.reads.num_pages) == (2, 1)
    assert traffic.reads.num_bytes == PAGE_BYTES and traffic.reads.seconds > 0
    cache.close()


@pytest.mark.parametrize("limit", [("READ_PAGES", 2), ("READ_BYTES", 2 * PAGE_BYTES)])
def test_a_read_in_parts_counts_up_to_the_first_page_that_is_missing(
    tmp_path: Path,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    limit: tuple[str, int],
) -> None:
    monkeypatch.setattr(disk_moves, *limit)
    gate.set()
    cache, ends = make(tmp_path), Ends()
    counts = list[int]()
    read = PageFiles.read

    def counted(store: PageFiles, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        counts.append(len(keys))
        return read(store, keys, into)

    monkeypatch.setattr(PageFiles, "read", counted)
    write = Move(1, Place.HOST, Place.DISK, tuple(range(8)), (*KEYS[:5], *KEYS[6:9]))
    cache.move([write], lambda *end: ends.put(end))
    assert ends.get() == (1, 8)
    cache.move(
        [Move(2, Place.DISK, Place.HOST, tuple(range(9)), KEYS[:9])], lambda *end: ends.put(end)
    )
    assert ends.get() == (2, 5)
    assert sorted(counts) == [1, 2, 2, 2, 2]
    cache.move([Move(3, Place.DISK, Place.HOST, (0, 1), KEYS[9:])], lambda *end: ends.put(end))
    assert ends.get() == (3, 0)
    cache.close()


def test_an_unexpected_error_ends_the_transfer(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    cache, ends = make(tmp_path), Ends()
    monkeypatch.setattr(cache.copies.slabs, "views", None)
    monkeypatch.setattr(PageFiles, "write", None)
    monkeypatch.setattr(PageFiles, "read", None)
    both = [
        Move(1, Place.HOST, Place.DISK, (0, 1), KEYS[:2]),
        Move(2, Place.DISK, Place.HOST, (2, 3), KEYS[:2]),
    ]
    cache.move(both, lambda *end: ends.put(end))
    assert {ends.get(), ends.get()} == {(1, 0), (2, 0)}
    cache.close()


def test_the_speed_of_the_disk_is_measured_and_leaves_no_file(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    cache = make(tmp_path)
    rule = cache.measure_disk(LoadRule(load_s=1.0, compute_s=9.0, delay_s=2.0))
    assert rule.load_s > 1.0 and rule.delay_s >= 2.0 and rule.compute_s == 9.0
    assert not list(tmp_path.iterdir()) and not cache.traffic().reads.num_pages
    monkeypatch.setattr(PageFiles, "write", lambda *_: 0)  # it is read-only
    rule = cache.measure_disk(LoadRule(load_s=1.0, compute_s=9.0))
    assert rule.load_s == 1.0 + PAGE_BYTES / 1e9
    cache.close()


def test_what_every_rank_has_done_counts() -> None:
    moves, ends = FewestPages(3), Ends()
    both = [Move(index, Place.DISK, Place.HOST, (0, 1, 2, 3), KEYS[:4]) for index in (1, 2)]
    assert unpacked(packed(MOVE, both), list[Move]) == both
    assert packed(MOVE, both).startswith(MOVE)
    moves.expect(both, lambda *end: ends.put(end))
    for move, num_pages in ((1, 4), (2, 4), (1, 2), (2, 4)):
        moves.ended(move, num_pages)
    assert ends.empty()
    moves.ended(1, 3)
    moves.ended(2, 4)
    assert [ends.get(), ends.get()] == [(1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disk_cache": "kv"}, "--host-cache, which is off"),
        ({"disk_cache": "", "host_cache": 1.0}, "a folder"),
        ({"disk_cache_gb": 0.0}, "above 0"),
        ({"disk_cache_gb": float("inf")}, "above 0"),
        ({"disk_cache": "kv", "host_cache": 1.0, "nnodes": 2, "pp": 2}, "--nnodes 1"),
    ],
    ids=str,
)
def test_a_disk_cache_that_cannot_be_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**options)  # type: ignore[arg-type]
