"""Transfers between host pages and the disk, beside the copies of plans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.host_cache_cases import cache_of, holds, write
from support.slow_lanes import SlowLane

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.kvcache.copies import Copies, Load, LoadRule
from minisgl.kvcache.store import Transfer, Way
from minisgl.runner import disk_lane
from minisgl.runner.host_cache import HostCache
from minisgl.runner.lanes import Lanes
from minisgl.runner.page_files import PageFiles
from minisgl.runner.parallel.plan_codec import TRANSFER, decode_transfers, encode_transfers
from minisgl.runner.parallel.transfers import Transfers

CPU = torch.device("cpu")
PAGE_BYTES = 4 * 2 * 16 * 4 * 6  # of support.host_cache_cases
KEYS = tuple(bytes([index]) * 32 for index in range(30))
Ends = queue.SimpleQueue[tuple[int, int]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Of all slow lanes."""
    gate = threading.Event()
    monkeypatch.setattr(SlowLane, "gate", gate)
    return gate


def make(folder: Path) -> HostCache:
    store = PageFiles(folder, bytes(32), PAGE_BYTES, 1 << 30)
    return HostCache(cache_of(CPU), 12, Lanes(CPU), SlowLane, store)


def test_transfers_wait_for_the_copies_of_their_pages(
    tmp_path: Path, gate: threading.Event
) -> None:
    kv, ends = cache_of(CPU), Ends()
    store = PageFiles(tmp_path, bytes(32), PAGE_BYTES, 1 << 30)
    cache = HostCache(kv, 12, Lanes(CPU), SlowLane, store)

    def transfer(*transfers: Transfer) -> None:
        cache.transfer(transfers, lambda *end: ends.put(end))

    write(kv, 1, 5.0)
    write(kv, 2, 6.0)
    cache.queue(Copies(offloads=((1, 3), (2, 4))))
    transfer(Transfer(1, Way.WRITE, KEYS[:2], (4, 3)))
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    gate.set()
    assert ends.get() == (1, 2)
    gate.clear()
    cache.queue(Copies(loads=(Load(1, (3,), (7,)),)))()
    transfer(Transfer(2, Way.READ, KEYS[:1], (3,)))  # overwrites what is being loaded
    with pytest.raises(queue.Empty):
        ends.get(timeout=0.05)
    gate.set()
    assert ends.get() == (2, 1)
    cache.queue(Copies(loads=(Load(2, (3,), (8,)),)))()[2].wait()
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
    monkeypatch.setattr(disk_lane, *limit)
    gate.set()
    cache, ends = make(tmp_path), Ends()
    counts = list[int]()
    read = PageFiles.read

    def counted(store: PageFiles, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        counts.append(len(keys))
        return read(store, keys, into)

    monkeypatch.setattr(PageFiles, "read", counted)
    write = Transfer(1, Way.WRITE, (*KEYS[:5], *KEYS[6:9]), tuple(range(8)))
    cache.transfer([write], lambda *end: ends.put(end))
    assert ends.get() == (1, 8)
    cache.transfer([Transfer(2, Way.READ, KEYS[:9], tuple(range(9)))], lambda *end: ends.put(end))
    assert ends.get() == (2, 5)
    assert sorted(counts) == [1, 2, 2, 2, 2]
    cache.transfer([Transfer(3, Way.READ, KEYS[9:], (0, 1))], lambda *end: ends.put(end))
    assert ends.get() == (3, 0)
    cache.close()


def test_an_unexpected_error_ends_the_transfer(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    cache, ends = make(tmp_path), Ends()
    monkeypatch.setattr(cache.slabs, "views", None)
    monkeypatch.setattr(PageFiles, "write", None)
    monkeypatch.setattr(PageFiles, "read", None)
    both = [Transfer(1, Way.WRITE, KEYS[:2], (0, 1)), Transfer(2, Way.READ, KEYS[:2], (2, 3))]
    cache.transfer(both, lambda *end: ends.put(end))
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
    transfers, ends = Transfers(3), Ends()
    both = [Transfer(index, Way.READ, KEYS[:4], (0, 1, 2, 3)) for index in (1, 2)]
    assert decode_transfers(encode_transfers(both)) == both
    assert encode_transfers(both).startswith(TRANSFER)
    transfers.begin(both, lambda *end: ends.put(end))
    for transfer, num_pages in ((1, 4), (2, 4), (1, 2), (2, 4)):
        transfers.ended(transfer, num_pages)
    assert ends.empty()
    transfers.ended(1, 3)
    transfers.ended(2, 4)
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
