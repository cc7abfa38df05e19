"""Exchanges between ranks, all of which are on one GPU here: each has a stream, and its kernel
waits for the others'."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minisgl.kernels import triton_peers
from minisgl.kernels.triton_norm import add_rms_norm
from minisgl.kernels.triton_peers import Mailbox, SharedMemory

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GPU = torch.device("cuda")
EPS = 1e-6


T = TypeVar("T")


class Ranks:
    """On one GPU, each with a stream of its own, where its kernels wait for those of the others."""

    def __init__(self, num_ranks: int, max_rows: int, num_words: int) -> None:
        self._shape = (2, num_ranks, max_rows, num_words)
        self._streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        self.boxes = self._mailboxes([0, 0])

    def _mailboxes(self, stamps: list[int]) -> list[Mailbox]:
        inboxes = [torch.zeros(self._shape, dtype=torch.int64, device=GPU) for _ in self._streams]
        for inbox in inboxes:
            for half, stamp in zip(inbox, stamps, strict=True):
                half.fill_(stamp << 32)
        addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=GPU)
        return [
            Mailbox(
                inbox, addresses, torch.zeros(self._shape[2], dtype=torch.int32, device=GPU), rank
            )
            for rank, inbox in enumerate(inboxes)
        ]

    def run(self, work: Callable[[Mailbox], T]) -> list[T]:
        """`work` of all ranks at once."""
        # A kernel is loaded when it is first launched, for which the GPU may have to be idle. So
        # all run before, in inboxes where they find the stamps of two exchanges already.
        self._each(self._mailboxes([2, 1]), work)
        return self._each(self.boxes, work)

    def _each(self, boxes: list[Mailbox], work: Callable[[Mailbox], T]) -> list[T]:
        torch.cuda.synchronize()
        results: list[T] = []
        for stream, box in zip(self._streams, boxes, strict=True):
            with torch.cuda.stream(stream):
                results.append(work(box))
        torch.cuda.synchronize()
        return results


def parts_of(num_ranks: int, num_rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(num_rows, size, device=GPU).to(dtype) for _ in range(num_ranks)]


def total_of(parts: list[Tensor]) -> Tensor:
    """In the order of ranks, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5120), (3, 1024), (7, 112), (12, 4098)])
def test_sums(num_ranks: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    ranks = Ranks(num_ranks, 16, size * dtype.itemsize // 4)
    for _ in range(5):  # both halves, more than once
        parts = parts_of(num_ranks, num_rows, size, dtype)

        def work(box: Mailbox, parts: list[Tensor] = parts) -> Tensor:
            return triton_peers.sum_rows(parts[box.rank], box)

        for found in ranks.run(work):
            assert torch.equal(found, total_of(parts))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5120), (3, 1024), (12, 112)])
def test_sums_and_norms(num_ranks: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    ranks = Ranks(num_ranks, 16, size * dtype.itemsize // 4)
    weight = torch.rand(size, device=GPU).to(dtype)
    for _ in range(3):
        parts = parts_of(num_ranks, num_rows, size, dtype)
        rows = torch.randn(num_rows, size, device=GPU).to(dtype)

        def work(
            box: Mailbox, parts: list[Tensor] = parts, rows: Tensor = rows
        ) -> tuple[Tensor, Tensor]:
            return triton_peers.sum_norm(parts[box.rank], rows.clone(), weight, EPS, box)

        results = ranks.run(work)
        normed, added = add_rms_norm(total_of(parts), rows, weight, EPS)
        for found_norm, found_rows in results:
            assert torch.equal(found_rows, added)
            assert torch.equal(found_norm, results[0][0])
            torch.testing.assert_close(found_norm, normed, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 38), (5, 1), (33, 7)])
def test_maxima(num_ranks: int, num_rows: int, num_columns: int) -> None:
    ranks = Ranks(num_ranks, 64, 2)
    for _ in range(3):
        values = torch.randint(-(2**55), 2**55, (num_ranks, num_rows, 50), device=GPU)
        values = values[:, :, :num_columns]

        def work(box: Mailbox, values: Tensor = values) -> Tensor:
            return triton_peers.maximum(values[box.rank], box)

        for maxima in ranks.run(work):
            assert torch.equal(maxima, values.amax(dim=(0, 2)))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (300, 1024), (77, 4096)])
def test_sums_and_gathers_of_many_rows(
    num_ranks: int, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(num_ranks, 1, 2)
    memory = [torch.zeros(3 << 20, dtype=torch.uint8, device=GPU) for _ in range(num_ranks)]
    addresses = torch.tensor([own.data_ptr() for own in memory], device=GPU)
    for _ in range(3):
        parts = parts_of(num_ranks, num_rows, size, dtype)

        def add(box: Mailbox, parts: list[Tensor] = parts) -> Tensor:
            shared = SharedMemory(memory[box.rank], addresses, box)
            return triton_peers.sum_many(parts[box.rank], shared)

        def gather(box: Mailbox, parts: list[Tensor] = parts) -> Tensor:
            shared = SharedMemory(memory[box.rank], addresses, box)
            return triton_peers.gather(parts[box.rank], shared)

        for found in ranks.run(add):
            assert torch.equal(found, total_of(parts))
        for found in ranks.run(gather):
            assert torch.equal(found, torch.cat(parts, dim=1))


def test_in_graphs_that_are_replayed() -> None:
    """Each replay is another exchange, which the device counts."""
    ranks = Ranks(2, 4, 512)
    parts = parts_of(2, 4, 1024, torch.bfloat16)

    def twice(box: Mailbox) -> Tensor:
        return triton_peers.sum_rows(triton_peers.sum_rows(parts[box.rank], box), box)

    ranks.run(lambda box: triton_peers.sum_rows(parts[box.rank], box))
    graphs: list[torch.cuda.CUDAGraph] = []
    results: list[Tensor] = []
    for box in ranks.boxes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(twice(box))
        graphs.append(graph)
    for _ in range(20):
        for part in parts:
            part.normal_()
        ranks._each(ranks.boxes, lambda box: graphs[box.rank].replay())
        once = total_of(parts)
        for result in results:
            assert torch.equal(result, total_of([once, once]))
