"""Lanes for copies between the tiers of the KV cache, one in each direction.

Work on a copy lane runs in order, beside the compute lane and the other lanes; what must come first
is given as marks. `Lanes.mark` is the place of the compute lane, and `CopyLane.hold_compute` lets
the compute lane wait in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minisgl.device.lanes import EventMark, Lanes


class Mark(Protocol):
    """A point in the work of a lane."""

    def wait(self) -> None:
        """Block until it is reached, without spinning; any thread may call it."""
        ...


class CopyMark(Mark, Protocol):
    """The end of one piece of work on a copy lane."""

    def is_reached(self) -> bool: ...

    def seconds(self) -> float:
        """How long the work took once it had begun. It must be done."""
        ...


class CopyLane(Protocol):
    def queue(self, work: Callable[[], None], after: Sequence[Mark]) -> CopyMark:
        """Run `work`, which queues copies and kernels, when `after` are reached. Returns at once
        if the device is a GPU."""
        ...

    def hold_compute(self, mark: CopyMark) -> None:
        """Let the compute lane go on only when `mark` is reached."""
        ...


class CudaCopyLane:
    """A stream, of high priority for copies: their kernels are few and short, and long DMAs wait
    for them."""

    def __init__(self, lanes: Lanes, priority: int) -> None:
        self._lanes = lanes
        self._stream = torch.cuda.Stream(lanes.device, priority=priority)

    def queue(self, work: Callable[[], None], after: Sequence[Mark]) -> CopyMark:
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range("beside the steps"):
            for mark in after:
                if isinstance(mark, EventMark | _CudaMark) and mark.event is not None:
                    self._stream.wait_event(mark.event)
            began.record(self._stream)
            work()
            ended.record(self._stream)
        return _CudaMark(began, ended)

    def hold_compute(self, mark: CopyMark) -> None:
        assert isinstance(mark, _CudaMark)
        self._lanes.wait_for(mark.event)


class _CudaMark:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self.event = ended

    def wait(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        reached: bool = self.event.query()
        return reached

    def seconds(self) -> float:
        milliseconds: float = self._began.elapsed_time(self.event)
        return milliseconds / 1e3


class HostCopyLane:
    """The lane of a CPU, where every call is synchronous."""

    def queue(self, work: Callable[[], None], after: Sequence[Mark]) -> CopyMark:
        for mark in after:
            mark.wait()
        began = time.perf_counter()
        work()
        return _Reached(time.perf_counter() - began)

    def hold_compute(self, mark: CopyMark) -> None:
        mark.wait()


class _Reached:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        pass

    def is_reached(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


def upload_pages(pages: Sequence[int], device: torch.device) -> Tensor:
    """Indices of pages as int64 on the device, for kernels that `work` queues after this."""
    indices = torch.tensor(pages, dtype=torch.int64)
    if device.type != "cuda":
        return indices
    return indices.pin_memory().to(device, non_blocking=True)


def copy_lane(lanes: Lanes, *, priority: int = -1) -> CopyLane:
    """priority: as CUDA counts it; 0 for work that steps need not wait for."""
    is_cuda = lanes.device.type == "cuda"
    return CudaCopyLane(lanes, priority) if is_cuda else HostCopyLane()
