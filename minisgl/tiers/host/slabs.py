"""Host pages in slabs of memory, pinned where the device is a GPU."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
MAX_THREADS = 16
_PORTABLE = 1  # cudaHostRegisterPortable


class Slabs:
    """Host pages in slabs.

    On a GPU all memory is pinned at the start. Meanwhile the driver keeps every other call waiting:
    on an H200, DMAs beside it went at 0.6 GB/s instead of 55, and a server that pinned as it ran
    took itself for slower than its own prefill. Threads give memory to the slabs first, which is
    most of the work, in pages as large as the system has.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        device: torch.device,
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """report: gets the fraction that is pinned."""
        self.num_pages = num_pages
        self._pages_per_slab = min(num_pages, max(1, SLAB_BYTES // page_bytes))
        shapes = [
            (min(self._pages_per_slab, num_pages - first), page_bytes)
            for first in range(0, num_pages, self._pages_per_slab)
        ]
        self._registered: list[int] = []  # addresses
        if device.type == "cuda":
            try:
                self._slabs = self._pinned(shapes, report)
            except BaseException:  # it would stay pinned until the process ends
                self._unpin()
                raise
        else:
            self._slabs = [torch.empty(shape, dtype=torch.uint8) for shape in shapes]

    def _pinned(
        self, shapes: Sequence[tuple[int, int]], report: Callable[[float], None]
    ) -> list[Tensor]:
        slabs: list[Tensor] = []
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(num_threads, "minisgl-host-memory") as threads:
            for memory, shape in zip(threads.map(_resident, shapes), shapes, strict=True):
                slab = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
                if len(self._registered) == len(slabs):  # otherwise one has failed
                    self._register(slab)
                slabs.append(slab)
                report(len(slabs) / len(shapes))
        return slabs

    def _register(self, slab: Tensor) -> None:
        address, runtime = slab.data_ptr(), torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, slab.nbytes, _PORTABLE))
        if code == 0:
            self._registered.append(address)
            return
        logger.warning(
            "The system pins no more memory for --host-cache after %.1f GB; copies to the rest are "
            "slow: error %d of CUDA",
            len(self._registered) * slab.nbytes / 1e9,
            code,
        )
        _forget_error()

    def runs(self, host_pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The host pages, ascending, as few tensors [n, page_bytes], each with the index of its
        first page in `host_pages`."""
        start = 0
        for end in range(1, len(host_pages) + 1):
            first, last = host_pages[start], host_pages[end - 1]
            slab = first // self._pages_per_slab
            if end < len(host_pages):
                following = host_pages[end]
                if following == last + 1 and following // self._pages_per_slab == slab:
                    continue
            row = first - slab * self._pages_per_slab
            yield start, self._slabs[slab][row : row + end - start]
            start = end

    def views(self, host_pages: Sequence[int]) -> list[memoryview]:
        """The memory of host pages, in any order."""
        return [row.numpy().data for _, run in self.runs(host_pages) for row in run.unbind()]

    def regions(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each slab."""
        for slab in self._slabs:
            yield slab.data_ptr(), slab.nbytes

    def close(self) -> None:
        """Free the memory, as soon as nobody has a view of it. No copy may be under way."""
        self._unpin()
        self._slabs.clear()

    def _unpin(self) -> None:
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()


def _forget_error() -> None:
    """Take CUDA's last error, which the next kernel would report otherwise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _resident(shape: tuple[int, int]) -> mmap.mmap:
    """Memory of this size, all of which the system has given."""
    memory = mmap.mmap(-1, shape[0] * shape[1])
    if hasattr(mmap, "MADV_HUGEPAGE"):  # not on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory
