"""Measures what limits the copies of a host cache: `python scripts/bench/bench_copies.py`.

It times a load in pieces, and how long a small upload waits behind it, such as that of each step.
Then it times offloads in pieces: with nothing beside them, beside a load, and while a thread pins
memory by torch. Then it times the allocation of a host cache's memory, and copies to it. Needs a
GPU, and 14 GB of host memory.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch import Tensor

from minisgl.bench.figures import Distribution
from minisgl.tiers.host.host_copies import PIECE_BYTES
from minisgl.tiers.host.slabs import SLAB_BYTES, Slabs

LOAD_BYTES, UPLOAD_BYTES, PAGE_BYTES = 1 << 30, 4 << 10, 1 << 20
UPLOAD_EVERY_S = 0.001
NUM_PINNED = 4  # pieces of a slab's size that are pinned meanwhile
NUM_SLABS = 8


def pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copy_in_pieces(
    target: Tensor, source: Tensor, priority: int = -1
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events before the first and behind the last, on a stream of their own."""
    stream = torch.cuda.Stream(priority=priority)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(stream)
    with torch.cuda.stream(stream):
        pieces = zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True)
        for there, here in pieces:
            there.copy_(here, non_blocking=True)
    ended.record(stream)
    return began, ended


def bytes_per_s(target: Tensor, source: Tensor) -> float:
    began, ended = copy_in_pieces(target, source)
    ended.synchronize()
    return source.nbytes / began.elapsed_time(ended) * 1e3


def time_uploads(host: Tensor, device: Tensor) -> tuple[float, Distribution]:
    """Bytes per second of a load, and the seconds of uploads beside it."""
    uploads = torch.cuda.Stream()
    source, target = pinned(UPLOAD_BYTES), torch.empty(UPLOAD_BYTES, dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    began, ended = copy_in_pieces(device, host)
    taken: list[float] = []
    while not ended.query():
        start = time.perf_counter()
        with torch.cuda.stream(uploads):
            target.copy_(source, non_blocking=True)
        uploads.synchronize()
        taken.append(time.perf_counter() - start)
        time.sleep(UPLOAD_EVERY_S)
    return host.nbytes / began.elapsed_time(ended) * 1e3, Distribution.of(taken)


def tell(what: str, rate: float) -> None:
    print(f"{what}: {rate / 1e9:.1f} GB/s", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("bench_copies.py needs a GPU.", file=sys.stderr)
        return 1
    host, other = pinned(LOAD_BYTES), pinned(LOAD_BYTES)
    device, there = (torch.empty(LOAD_BYTES, dtype=torch.uint8).cuda() for _ in range(2))
    torch.cuda.synchronize()

    time_uploads(host, device)  # warms up
    rate, taken = time_uploads(host, device)
    tell("a load", rate)
    print(f"uploads beside it: p50 {taken.p50 * 1e6:.0f} µs, p99 {taken.p99 * 1e6:.0f} µs")
    bytes_per_s(other, there)
    tell("offloads alone", bytes_per_s(other, there))
    copy_in_pieces(device, host, priority=0)
    tell("beside a load", bytes_per_s(other, there))
    torch.cuda.synchronize()
    pinning = threading.Thread(target=lambda: [pinned(SLAB_BYTES) for _ in range(NUM_PINNED)])
    pinning.start()
    rates: list[float] = []
    while pinning.is_alive():
        rates.append(bytes_per_s(other, there))
    tell("while memory is pinned", Distribution.of(rates).p50)
    began = time.perf_counter()
    num_pages, num_copied = NUM_SLABS * SLAB_BYTES // PAGE_BYTES, LOAD_BYTES // PAGE_BYTES
    slabs = Slabs(num_pages, PAGE_BYTES, there.device)
    tell("memory of a host cache", num_pages * PAGE_BYTES / (time.perf_counter() - began))
    for page in (0, num_pages - num_copied):
        ((_, run),) = slabs.runs(range(page, page + num_copied))
        tell(f"offloads there, from page {page} on", bytes_per_s(run.flatten(), there))
    slabs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
