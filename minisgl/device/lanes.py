"""Lanes: the CUDA streams of one device, and the order between them.

    h2d      ─[plan of N]─┐uploaded
    compute  ─────────────┴─[tables, model, sampling, tokens of N]──┐computed
    d2h                                              (prompt scores)┴─[scores of N]──┐downloaded
    host     ───────────────────────────────────────────────────────┴────────────────┴─ collect(N)

Steps run one after the other on `compute` only, so everything they share (slot tables, KV pages)
changes in launch order without further events. In steady decode `compute` is the only lane in use:
one graph, whose last kernel writes the tokens to host memory.

A tensor that crosses lanes is allocated on the lane that writes it and recorded
(`Tensor.record_stream`) on the lane that reads it, so that the caching allocator does not reuse its
memory before that lane is done. A captured graph owns all the tensors it uses.
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

from minisgl.matcher import MaskRows

GraphPool = Any  # as returned by torch.cuda.graph_pool_handle


@dataclass(frozen=True, slots=True)
class EventMark:
    """A point in the work queued on a lane."""

    event: torch.cuda.Event | None  # None: it is reached

    def wait(self) -> None:
        """Block without spinning; any thread may call it."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Host copies that are complete once `wait` returns."""

    tensors: tuple[Tensor, ...]
    _downloaded: EventMark

    def wait(self) -> tuple[Tensor, ...]:
        """Block without spinning; any thread may call it."""
        self._downloaded.wait()
        return self.tensors


def pack(parts: Sequence[ArrayLike], *, pinned: bool) -> tuple[Tensor, list[int]]:
    """Concatenate `parts` into one int64 host tensor; returns it and the size of each part.

    A new tensor each time: torch's host allocator does not reuse pinned memory before the copies
    from it have finished, so nothing overwrites it while it is read.
    """
    arrays = [np.asarray(part, dtype=np.int64) for part in parts]
    sizes = [len(array) for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(arrays, out=packed.numpy())
    return packed, sizes


class Lanes:
    """The lanes of one device. On a CPU every call is synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._compute = torch.cuda.Stream(device)
            self._h2d = torch.cuda.Stream(device)
            self._d2h = torch.cuda.Stream(device)

    def enter_thread(self) -> None:
        """Make this device torch's default in the calling thread. Every thread that uses the lanes
        must call it once."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def compute(self, label: str) -> Iterator[None]:
        """Queue what the context contains on the compute lane, under an NVTX range of this name."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._compute), torch.cuda.nvtx.range(label):
            yield

    def graph_pool(self) -> GraphPool:
        """A memory pool shared by graphs, of the size that the largest needs: they never run
        concurrently, and none reads data of another. It is freed with the last graph."""
        return torch.cuda.graph_pool_handle() if self._is_cuda else None

    def capture(self, work: Callable[[], None], pool: GraphPool) -> Callable[[], None]:
        """Capture what `work` queues on the compute lane, without running it; returns a function
        that replays it as one launch.

        `work` must have run before, so that its kernels are compiled. On a CPU, returns `work`.
        """
        if not self._is_cuda:
            return work
        with torch.cuda.stream(self._compute):
            return self.capture_here(work, pool)

    def capture_here(self, work: Callable[[], None], pool: GraphPool) -> Callable[[], None]:
        """Do the same on the current stream, which no other thread may use meanwhile."""
        if not self._is_cuda:
            return work
        graph = torch.cuda.CUDAGraph()
        # thread_local: allows other threads to wait for events meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay

    def mark(self) -> EventMark:
        """Mark the end of the work queued on the compute lane so far."""
        if not self._is_cuda:
            return EventMark(None)
        computed = torch.cuda.Event(blocking=True)
        computed.record(self._compute)
        return EventMark(computed)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Let what is queued on the compute lane from here on follow an event of another lane."""
        self._compute.wait_event(event)

    def upload(self, parts: Sequence[ArrayLike]) -> tuple[Tensor, ...]:
        """Upload `parts` in one copy; returns an int64 tensor for each, ready for use on the
        compute lane."""
        source, sizes = pack(parts, pinned=self._is_cuda)
        if not self._is_cuda:
            return torch.split(source, sizes)
        return torch.split(self._uploaded(source), sizes)

    def upload_masks(self, masks: MaskRows) -> Tensor:
        """Copy masks to the device while it computes; returns int32 for use on the compute lane.

        Pinned memory must stay as it is until the step is done; other memory may change at once.
        """
        source = torch.from_numpy(masks.view(np.int32))
        if not self._is_cuda:
            return source
        if not source.is_pinned():
            source = source.pin_memory()
        return self._uploaded(source)

    def _uploaded(self, source: Tensor) -> Tensor:
        with torch.cuda.stream(self._h2d):
            target = source.to(self.device, non_blocking=True)
            uploaded = torch.cuda.Event()
            uploaded.record(self._h2d)
        self._compute.wait_event(uploaded)
        target.record_stream(self._compute)
        return target

    def synchronize(self) -> None:
        """Wait for everything queued on the device, on any stream."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying results of the compute lane to the host."""
        if not self._is_cuda:
            return HostCopy(tuple(tensors), EventMark(None))
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
        return HostCopy(tuple(copies), EventMark(downloaded))
