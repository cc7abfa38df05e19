"""Checks of the copies of a host cache, on any device and lanes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from minisgl.attention.state import LayerState, PagedKV, StateBySlot
from minisgl.device.copy_lanes import CopyLane, CopyMark
from minisgl.device.lanes import Lanes
from minisgl.kvcache.copies import Copies, Load
from minisgl.tiers.host.host_copies import HostCopies
from minisgl.tiers.host.numbering import Numbering

NUM_PAGES, NUM_HOST_PAGES = 40, 30


def cache_of(device: torch.device, page_size: int = 4, head_dim: int = 16) -> list[PagedKV]:
    shape = (NUM_PAGES, page_size, 2, head_dim)
    return [PagedKV(*(torch.zeros(shape, device=device) for _ in "kv")) for _ in range(3)]


def numbering_of(states: Sequence[LayerState], first_snapshot: int = 0) -> Numbering:
    """Of a model without stages, whose full layers have a page of host memory."""
    paged = [each for each in states if isinstance(each, PagedKV)]
    whole, windowed = (
        [plane for each in paged if each.windowed == kind for plane in each.planes]
        for kind in (False, True)
    )
    tensors = [each for state in states if isinstance(state, StateBySlot) for each in state.tensors]
    page_bytes = sum(plane[0].nbytes for plane in whole)
    sizes = (sum(each[0].nbytes for each in kind) for kind in (tensors, windowed))
    state_parts, window_parts = (max(1, -(-size // page_bytes)) for size in sizes)
    num_snapshots = len(tensors[0]) - first_snapshot if tensors else 0
    return Numbering(
        page_bytes, len(whole[0]), num_snapshots, first_snapshot, state_parts, window_parts
    )


def write(kv: list[PagedKV], page: int, value: float) -> None:
    for index, layer in enumerate(kv):
        layer.k[page] = value + index
        layer.v[page] = -value - index


def holds(kv: list[PagedKV], page: int, value: float) -> bool:
    return all(
        bool((layer.k[page] == value + index).all() and (layer.v[page] == -value - index).all())
        for index, layer in enumerate(kv)
    )


def check_copies(device: torch.device, make_lane: Callable[[Lanes], CopyLane]) -> HostCopies:
    """Random plans: pages are offloaded and written over at once, and loaded and read where they
    are awaited. Each host page is loaded while its own offload may be under way."""
    lanes, rng = Lanes(device), random.Random(0)
    kv = cache_of(device)
    lanes.synchronize()
    cache = HostCopies(kv, NUM_HOST_PAGES, numbering_of(kv), lanes, make_lane)
    free = list(range(1, NUM_PAGES))
    host: dict[int, float] = {}  # what each host page holds
    in_flight: dict[int, tuple[Load, list[float]]] = {}  # and what it brings
    last: dict[int, CopyMark] = {}
    for step in range(1, 60):
        landed = [in_flight.pop(load) for load in list(in_flight) if rng.random() < 0.4]
        locked = {page for load, _ in in_flight.values() for page in load.host_pages}
        targets = [page for page in range(NUM_HOST_PAGES) if page not in locked]
        count = rng.randint(0, min(12, len(targets), len(free)))
        pages, targets = rng.sample(free, count), rng.sample(targets, count)
        wanted = rng.sample(sorted({*host, *targets}), rng.randint(0, min(9, len(host))))
        wanted = wanted[: len(free) // 2]
        with lanes.compute("step"):
            for place, (page, target) in enumerate(zip(pages, targets, strict=True)):
                host[target] = float(1000 * step + 10 * place)
                write(kv, page, host[target])
            taken = [page for page in free if page not in pages][: len(wanted)]
            taken += pages[: len(wanted) - len(taken)]  # and at once for something else
            load = Load(step, tuple(wanted), tuple(taken))
            awaits = tuple(found.id for found, _ in landed)
            offloads = tuple(zip(pages, targets, strict=True))
            begin = cache.queue(Copies(offloads, (load,) if wanted else (), awaits))
            free = [page for page in free if page not in taken]
            for page in set(pages) & set(free):
                write(kv, page, -1.0)  # the step itself writes there
            last = begin()
            for found, values in landed:
                there = zip(found.pages, values, strict=True)
                assert all(holds(kv, page, value) for page, value in there), "read too early"
                free += found.pages
        if wanted:
            in_flight[step] = load, [host[page] for page in wanted]
    for mark in last.values():
        mark.wait()
    lanes.synchronize()
    return cache
