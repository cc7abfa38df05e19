"""The streams of one device and the order between them.

    h2d      ─[plan of N]─┐uploaded
    compute  ─────────────┴─[tables, model, sampling, tokens of N]──┐computed
    d2h                                              (prompt scores)┴─[scores of N]──┐downloaded
    host     ───────────────────────────────────────────────────────┴────────────────┴─ collect(N)

Steps follow each other on `compute` and nowhere else, so that everything they share (slot tables,
KV pages) changes in launch order without further events. In a steady step of decode `compute` is
the only lane in use: one graph, whose last kernel writes the tokens to the host itself.

The one rule for tensors that cross lanes lives here too: a tensor is allocated on the lane that
fills it and recorded on the lane that reads it, so that the caching allocator does not hand its
memory out again before that lane has passed. A captured graph owns all it touches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

GraphPool = Any  # the handle of a memory pool, as torch.cuda.graph_pool_handle makes it


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on a lane, which the device passes some time."""

    _event: torch.cuda.Event | None

    def wait(self) -> None:
        """Blocks without spinning; any thread may call it."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Download:
    """Host copies that are complete once `wait` returns."""

    tensors: tuple[Tensor, ...]
    _downloaded: Mark

    def wait(self) -> tuple[Tensor, ...]:
        """Blocks without spinning; any thread may call it."""
        self._downloaded.wait()
        return self.tensors


def pack(parts: Sequence[ArrayLike], *, pinned: bool) -> tuple[Tensor, list[int]]:
    """`parts` one behind the other, int64, on the host, and the size of each.

    The tensor is a fresh one each time. torch's host allocator does not hand pinned memory out
    again before the copies from it are over, so that nothing overwrites it while it is read.
    """
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    sizes = [len(array) for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(arrays, out=packed.numpy())
    return packed, sizes


class Lanes:
    """On a CPU everything is done when it returns, and there is nothing to order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._compute = torch.cuda.Stream(device)
            self._h2d = torch.cuda.Stream(device)
            self._d2h = torch.cuda.Stream(device)

    def enter_thread(self) -> None:
        """To be called once by each thread that uses the lanes: what torch does without being told
        where is then done on this device."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def compute(self, label: str) -> Iterator[None]:
        """Queue on the compute lane, under an NVTX range for profilers."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._compute), torch.cuda.nvtx.range(label):
            yield

    def graph_pool(self) -> GraphPool:
        """Memory for graphs that share it, as much as the largest needs: no two run at once, and
        what one leaves there nobody reads. It ends with the last of them."""
        return torch.cuda.graph_pool_handle() if self._is_cuda else None

    def capture(self, work: Callable[[], None], pool: GraphPool) -> Callable[[], None]:
        """Record what `work` queues on the compute lane, instead of running it; returns what queues
        it again, as one launch. `work` has run before, so that its kernels are compiled.

        On a CPU, where there is nothing to record, it returns `work`.
        """
        if not self._is_cuda:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._compute):
            # Other threads may go on to wait for events.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def mark(self) -> Mark:
        """The end of what the compute lane has queued."""
        if not self._is_cuda:
            return Mark(None)
        computed = torch.cuda.Event(blocking=True)
        computed.record(self._compute)
        return Mark(computed)

    def upload(self, parts: Sequence[ArrayLike]) -> tuple[Tensor, ...]:
        """int64 tensors of `parts` for the compute lane, in one copy."""
        source, sizes = pack(parts, pinned=self._is_cuda)
        if not self._is_cuda:
            return torch.split(source, sizes)
        with torch.cuda.stream(self._h2d):
            target = source.to(self.device, non_blocking=True)
            uploaded = torch.cuda.Event()
            uploaded.record(self._h2d)
        self._compute.wait_event(uploaded)
        target.record_stream(self._compute)
        return torch.split(target, sizes)

    def synchronize(self) -> None:
        """Wait for everything queued on the device, on any stream."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying results of the compute lane to the host."""
        if not self._is_cuda:
            return Download(tuple(tensors), Mark(None))
        computed = torch.cuda.Event()
        computed.record(self._compute)
        self._d2h.wait_event(computed)
        copies: list[Tensor] = []
        with torch.cuda.stream(self._d2h):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._d2h)
            downloaded = torch.cuda.Event(blocking=True)
            downloaded.record(self._d2h)
        return Download(tuple(copies), Mark(downloaded))
