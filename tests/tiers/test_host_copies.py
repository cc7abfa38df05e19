"""The copies between device and host memory: their order, their pieces, their memory."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.host_copy_cases import cache_of, check_copies, holds, numbering_of, write
from support.slow_lanes import SlowLane

from minisgl.config import EngineConfig, memory_bytes, resolve
from minisgl.device.copy_lanes import CopyMark, HostCopyLane, copy_lane
from minisgl.device.lanes import Lanes
from minisgl.distributed.communicator import SingleRank
from minisgl.distributed.pipeline import OneStage
from minisgl.errors import ConfigError
from minisgl.kvcache.copies import Copies, Load, LoadRule
from minisgl.models.hub import DEMO_FOLDER
from minisgl.models.registry import read_model_config
from minisgl.runner.facts import device_facts
from minisgl.runner.load import TICK_S, slowest_rule
from minisgl.tiers.host import host_copies, slabs
from minisgl.tiers.host.host_copies import HostCopies, Ring, offloads_per_plan, staging_bytes
from minisgl.tiers.host.slabs import Slabs

CPU = torch.device("cpu")
PAGE_BYTES = 3 * 2 * 4 * 2 * 16 * 4  # as of `cache_of`


@pytest.mark.parametrize("make_lane", [copy_lane, SlowLane], ids=["at once", "slow"])
@pytest.mark.parametrize("pages_per_piece", [1, 5, 100])
def test_pages_travel_in_the_order_of_plans(
    make_lane: type[SlowLane], pages_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", pages_per_piece * PAGE_BYTES)
    monkeypatch.setattr(host_copies, "LOAD_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 7 * PAGE_BYTES)
    monkeypatch.setattr(host_copies, "NUM_STAGED", 2)
    cache = check_copies(CPU, make_lane)
    traffic = cache.traffic()
    assert cache.page_bytes == PAGE_BYTES
    for total in (traffic.offloads, traffic.loads):
        assert total.num_pages > 50 and total.num_bytes == total.num_pages * PAGE_BYTES
    cache.close()


def test_a_load_waits_for_the_offload_of_its_own_pages_only() -> None:
    gates = [threading.Event(), threading.Event()]

    def make_lane(lanes: Lanes) -> SlowLane:
        lane = SlowLane(lanes)
        lane.gate = gates[0] if not made else gates[1]
        made.append(lane)
        return lane

    made: list[SlowLane] = []
    kv = cache_of(CPU)
    cache = HostCopies(kv, 10, numbering_of(kv), Lanes(CPU), make_lane)
    gates[0].set()
    gates[1].set()
    write(kv, 1, 5.0)
    cache.queue(Copies(offloads=((1, 3),)))
    cache.queue(Copies(loads=(Load(1, (3,), (2,)),)))()[1].wait()
    assert holds(kv, 2, 5.0)
    gates[0].clear()  # the lane of offloads stands still
    cache.queue(Copies(offloads=((1, 4),)))
    cache.queue(Copies(loads=(Load(2, (3,), (6,)),)))()[2].wait()
    assert holds(kv, 6, 5.0)
    blocked = cache.queue(Copies(loads=(Load(3, (4,), (7,)),)))()[3]
    assert not blocked.is_reached()
    gates[0].set()
    blocked.wait()
    assert holds(kv, 7, 5.0)


class FakeMark:
    def __init__(self, number: int, reached: list[int]) -> None:
        self.number = number
        self._reached = reached

    def is_reached(self) -> bool:
        return self.number < self._reached[0]

    def wait(self) -> None:
        raise AssertionError("the ring waits for nothing itself")

    def seconds(self) -> float:
        return 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=40))
def test_no_piece_is_staged_over_one_that_has_not_been_copied(
    pieces: list[tuple[int, int]],
) -> None:
    num_rows, reached = 12, [0]
    ring = Ring(torch.arange(num_rows)[:, None])
    staged: list[set[int]] = []
    for size, num_reached in pieces:
        packed, last = ring.take(size)
        rows = {int(row) for row in packed}
        assert len(rows) == size
        free = reached[0] if last is None else last.number + 1  # type: ignore[attr-defined]
        assert all(rows.isdisjoint(others) for others in staged[free:])
        under_way = set[int]().union(*staged[reached[0] :])
        assert last is None or not rows.isdisjoint(under_way)
        ring.leave(size, FakeMark(len(staged), reached))
        staged.append(rows)
        reached[0] = max(free, min(len(staged), reached[0] + num_reached))


def test_awaiting_a_load_that_never_began_does_nothing() -> None:
    cache = HostCopies(kv := cache_of(CPU), 10, numbering_of(kv), Lanes(CPU))
    assert cache.queue(Copies(awaits=(7,)))() == {}


def test_a_load_is_awaited_though_the_next_one_of_its_plan_could_not_begin() -> None:
    held: list[CopyMark] = []

    class Lane(HostCopyLane):
        def hold_compute(self, mark: CopyMark) -> None:
            held.append(mark)

    cache = HostCopies(kv := cache_of(CPU), 10, numbering_of(kv), Lanes(CPU), lambda lanes: Lane())
    first, second = Load(1, (3,), (5,)), Load(2, (3, 4), (6,))  # which lacks a page
    with pytest.raises(ValueError, match="zip"):
        cache.queue(Copies(loads=(first, second)))()
    cache.queue(Copies(awaits=(1, 2)))
    assert len(held) == 1
    cache.close()


def check_runs(pages: Slabs) -> None:
    """Of ten pages of 100 bytes, four in a slab."""
    assert sum(num_bytes for _, num_bytes in pages.regions()) == 1000
    runs = list(pages.runs([0, 1, 3, 5]))
    assert [(first, len(run)) for first, run in runs] == [(0, 2), (2, 1), (3, 1)]
    assert len(next(pages.runs([9]))[1]) == 1  # in the last one, which has two pages
    runs[0][1].fill_(1)
    ((_, both),) = list(pages.runs([0, 1]))
    assert (both == 1).all()
    assert [len(run) for _, run in pages.runs([2, 3, 4, 5])] == [2, 2]  # across slabs


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=str)
def test_pages_in_slabs_are_as_few_runs(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 400)
    runtime = FakeRuntime(max_pinned=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = Slabs(10, 100, device)
    check_runs(pages)
    pages.close()


class FakeRuntime:
    """As much of the CUDA runtime as pins memory."""

    def __init__(self, max_pinned: int) -> None:
        self._max_pinned = max_pinned
        self.sizes: dict[int, int] = {}  # of what is pinned, by address

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.sizes) == self._max_pinned:
            return 2
        self.sizes[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.sizes[address]
        return 0


def test_memory_is_pinned_at_once_and_what_cannot_be_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 400)
    runtime, forgotten, reported = FakeRuntime(max_pinned=1), list[bool](), list[float]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(slabs, "_forget_error", lambda: forgotten.append(True))
    pages = Slabs(10, 100, torch.device("cuda"), reported.append)
    assert [*runtime.sizes.items()] == [next(pages.regions())] and len(forgotten) == 1
    assert reported == [1 / 3, 2 / 3, 1.0]
    assert "pins no more memory for --host-cache" in caplog.text
    check_runs(pages)
    pages.close()
    assert not runtime.sizes


def test_memory_is_not_pinned_any_more_if_the_start_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 400)
    runtime = FakeRuntime(max_pinned=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def give_up(fraction: float) -> None:
        assert runtime.sizes
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        Slabs(10, 100, torch.device("cuda"), give_up)
    assert not runtime.sizes


def test_loads_are_timed_without_harm_to_any_page() -> None:
    kv = cache_of(CPU)
    write(kv, 1, 3.0)
    cache = HostCopies(kv, 10, numbering_of(kv), Lanes(CPU), lambda lanes: HostCopyLane())
    rule = cache.measure(compute_s=7.0)
    assert rule.load_s > 0 and rule.compute_s == 7.0 and rule.delay_s >= 0
    assert rule.pays(2, 2) and not cache.measure(compute_s=0.0).pays(2, 2)
    assert holds(kv, 1, 3.0)
    assert cache.traffic().loads.num_pages == 0


def resolved(**options: object) -> int:
    facts = read_model_config(DEMO_FOLDER).facts()
    config = EngineConfig(device="cpu", **options)  # type: ignore[arg-type]
    return resolve(config, facts, device_facts(facts), overlap=True).num_host_pages


def test_gigabytes_become_pages_over_all_ranks() -> None:
    facts = read_model_config(DEMO_FOLDER).facts()
    page = facts.kv_bytes_per_token("float32") * 16
    assert resolved() == 0
    assert resolved(host_cache=0.1) == int(0.1e9) // page
    layers = facts.kv_specs("float32")
    assert 300 << 20 < staging_bytes(page, 10**9) <= 5 * host_copies.PIECE_BYTES
    for num_host_pages in (10, 23, 1000):
        staged = staging_bytes(page, num_host_pages) // page
        assert staged <= num_host_pages
        assert offloads_per_plan(layers, 16, num_host_pages) == staged * 3 // 5
    assert offloads_per_plan(layers, 16, 1) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"host_cache": 2 * memory_bytes() / 1e9}, "80% of the .* GB that this machine has"),
        ({"host_cache": 1e-9}, "a page takes"),
        ({"host_cache": 1.0, "cache_type": "naive"}, "--cache-type radix"),
        ({"host_cache": -1.0}, "a number of GB"),
        ({"host_cache": float("nan")}, "a number of GB"),
    ],
    ids=str,
)
def test_a_host_cache_that_cannot_be_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved(**options)


def test_the_slowest_of_all_ranks_decides_what_is_loaded() -> None:
    class BesideAnother(SingleRank):
        """The other rank loads more slowly and computes sooner."""

        def __init__(self) -> None:
            self.others = iter((2e-6, 1e-3, 0.0))

        def host_min(self, number: int) -> int:
            return min(number, -round(next(self.others) / TICK_S))

    rule = slowest_rule(LoadRule(1e-6, 4e-3, 5e-6), OneStage(BesideAnother()))
    assert astuple(rule) == pytest.approx((2e-6, 4e-3, 5e-6))
