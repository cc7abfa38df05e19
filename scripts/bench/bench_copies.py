"""Measures what limits the copies of a host cache: `python scripts/bench/bench_copies.py`.

First, how long a small upload, as of each step, waits behind a load whose DMAs have various
sizes. Then the bandwidth of offloads in pieces: alone, beside a load, and while a thread pins
memory as torch does it. Last, how fast a host cache has its memory, and copies to that. Needs a
GPU, and 14 GB of host memory.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from rich.table import Table
from torch import Tensor

from minisgl.bench.figures import Distribution
from minisgl.bench.report.output import make_console
from minisgl.tiers.host.host_copies import PIECE_BYTES
from minisgl.tiers.host.slabs import SLAB_BYTES, Slabs

LOAD_BYTES = 1 << 30
UPLOAD_BYTES = 4 << 10
UPLOAD_EVERY_S = 0.001
DMA_MB = (1, 4, 8, 16, 64, 256)
NUM_PINNED = 4  # pieces of a slab's size that are pinned meanwhile
NUM_SLABS = 8
PAGE_BYTES = 1 << 20


def pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copy_in_pieces(target: Tensor, source: Tensor, size: int, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        for there, here in zip(target.split(size), source.split(size), strict=True):
            there.copy_(here, non_blocking=True)


def time_uploads(host: Tensor, device: Tensor, dma_bytes: int) -> tuple[float, Distribution]:
    """Bytes per second of a load, and the seconds of uploads beside it."""
    loads, uploads = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    source, target = pinned(UPLOAD_BYTES), torch.empty(UPLOAD_BYTES, dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(loads)
    copy_in_pieces(device, host, dma_bytes, loads)
    ended.record(loads)
    taken: list[float] = []
    while not ended.query():
        start = time.perf_counter()
        with torch.cuda.stream(uploads):
            target.copy_(source, non_blocking=True)
        uploads.synchronize()
        taken.append(time.perf_counter() - start)
        time.sleep(UPLOAD_EVERY_S)
    return host.nbytes / began.elapsed_time(ended) * 1e3, Distribution.of(taken)


def time_offloads(host: Tensor, device: Tensor) -> float:
    """Bytes per second."""
    stream = torch.cuda.Stream(priority=-1)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(stream)
    copy_in_pieces(host, device, PIECE_BYTES, stream)
    ended.record(stream)
    ended.synchronize()
    return host.nbytes / began.elapsed_time(ended) * 1e3


def main() -> int:
    if not torch.cuda.is_available():
        print("bench_copies.py needs a GPU.", file=sys.stderr)
        return 1
    console = make_console()
    host, other = pinned(LOAD_BYTES), pinned(LOAD_BYTES)
    device, there = (torch.empty(LOAD_BYTES, dtype=torch.uint8).cuda() for _ in range(2))
    torch.cuda.synchronize()

    table = Table("DMAs of a load, MB")
    for heading in ("load GB/s", "upload p50 us", "upload p99 us"):
        table.add_column(heading, justify="right")
    time_uploads(host, device, PIECE_BYTES)  # warms up
    for size in DMA_MB:
        rate, taken = time_uploads(host, device, size << 20)
        row = (f"{rate / 1e9:.1f}", f"{taken.p50 * 1e6:.0f}", f"{taken.p99 * 1e6:.0f}")
        table.add_row(str(size), *row)
    console.print(table)

    time_offloads(other, there)
    console.print(f"offloads alone: {time_offloads(other, there) / 1e9:.1f} GB/s")
    copy_in_pieces(device, host, PIECE_BYTES, torch.cuda.Stream())
    console.print(f"beside a load: {time_offloads(other, there) / 1e9:.1f} GB/s")
    torch.cuda.synchronize()
    pinning = threading.Thread(target=lambda: [pinned(SLAB_BYTES) for _ in range(NUM_PINNED)])
    pinning.start()
    rates: list[float] = []
    while pinning.is_alive():
        rates.append(time_offloads(other, there))
    console.print(f"while memory is pinned: {Distribution.of(rates).p50 / 1e9:.1f} GB/s")
    began = time.perf_counter()
    num_pages = NUM_SLABS * SLAB_BYTES // PAGE_BYTES
    slabs = Slabs(num_pages, PAGE_BYTES, there.device)
    seconds = time.perf_counter() - began
    console.print(f"memory of a host cache: {slabs.num_bytes / seconds / 1e9:.1f} GB/s")
    for page in (0, num_pages - LOAD_BYTES // PAGE_BYTES):
        ((_, run),) = slabs.runs(range(page, page + LOAD_BYTES // PAGE_BYTES))
        rate = time_offloads(run.flatten(), there)
        console.print(f"offloads there, from page {page} on: {rate / 1e9:.1f} GB/s")
    slabs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
