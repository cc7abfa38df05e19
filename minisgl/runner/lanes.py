"""The streams of one device and the order between them.

    h2d      ─[ids of N]──┐uploaded
    compute  ─────────────┴─[tables, model, sampling of N]──┐computed
    d2h      ───────────────────────────────────────────────┴─[tokens of N]──┐downloaded
    host     ────────────────────────────────────────────────────────────────┴─ collect(N)

Steps follow each other on `compute` and nowhere else, so that everything they share (slot tables,
KV pages) changes in launch order without further events.

The one rule for tensors that cross lanes lives here too: a tensor is allocated on the lane that
fills it and recorded on the lane that reads it, so that the caching allocator does not hand its
memory out again before that lane has passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Download:
    """Host copies that are complete once `wait` returns."""

    tensors: tuple[Tensor, ...]
    _downloaded: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """Blocks without spinning; any thread may call it."""
        if self._downloaded is not None:
            self._downloaded.synchronize()
        return self.tensors


class Lanes:
    """On a CPU everything is done when it returns, and there is nothing to order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._compute = torch.cuda.Stream(device)
            self._h2d = torch.cuda.Stream(device)
            self._d2h = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def compute(self, label: str) -> Iterator[None]:
        """Queue on the compute lane, under an NVTX range for profilers."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._compute), torch.cuda.nvtx.range(label):
            yield

    def upload(self, parts: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """int64 tensors of `parts` for the compute lane, in one copy."""
        sizes = [len(part) for part in parts]
        packed = [value for part in parts for value in part]
        if not self._is_cuda:
            return torch.split(torch.tensor(packed, dtype=torch.int64), sizes)
        source = torch.tensor(packed, dtype=torch.int64, pin_memory=True)
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
            return Download(tuple(tensors), None)
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
        return Download(tuple(copies), downloaded)
