"""Communication between ranks that share one GPU: each has a stream, and its kernel waits for the
others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.mailboxes import make_mailboxes

from minisgl.kernels.comm import gather, one_shot, two_shot
from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.comm.shared_memory import SharedMemory
from minisgl.kernels.elementwise.norm import add_rms_norm
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.dense_tiles import allocate_workspace
from minisgl.kernels.linear.epilogue import Epilogue

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GPU = torch.device("cuda")
EPS = 1e-6


T = TypeVar("T")
S = TypeVar("S")


class Ranks:
    """On one GPU, each with a stream of its own, where its kernels wait for those of the others."""

    def __init__(self, num_ranks: int, max_rows: int, size: int, itemsize: int) -> None:
        self._shape = (num_ranks, max_rows, size, itemsize)
        self._streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        self.boxes = make_mailboxes(*self._shape, GPU)

    def _boxes_to_warm_up(self) -> list[Mailbox]:
        """In which there are the stamps of two exchanges already."""
        boxes = make_mailboxes(*self._shape, GPU)
        for box in boxes:
            box.inbox[0].fill_(2)
            box.inbox[1].fill_(1)
        return boxes

    def run(self, work: Callable[[Mailbox], T]) -> list[T]:
        """`work` of all ranks at once."""
        # A kernel is loaded when it is first launched, for which the GPU may have to be idle. So
        # all run before, where none waits.
        self._each(self._boxes_to_warm_up(), work)
        return self._each(self.boxes, work)

    def _each(self, boxes: Sequence[T], work: Callable[[T], S]) -> list[S]:
        torch.cuda.synchronize()
        results: list[S] = []
        for stream, box in zip(self._streams, boxes, strict=True):
            with torch.cuda.stream(stream):
                results.append(work(box))
        torch.cuda.synchronize()
        return results


class SharingRanks(Ranks):
    """Ranks with shared memory, for more rows than programs."""

    PROGRAMS = 16

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks, 1, 2, 4)
        self._memory = [torch.zeros(6 << 20, dtype=torch.uint8, device=GPU) for _ in self._streams]
        self.shared = self._shared(self.boxes, done=0)

    def _shared(self, boxes: list[Mailbox], *, done: int) -> list[SharedMemory]:
        """`done`: rounds that count as done by all."""
        shape = (2, self.PROGRAMS, len(boxes))
        flags = [torch.full(shape, done, dtype=torch.int32, device=GPU) for _ in boxes]
        return [
            SharedMemory(
                own=self._memory[box.rank],
                addresses=tuple(own.data_ptr() for own in self._memory),
                flags=flags[box.rank],
                flag_addresses=tuple(of_rank.data_ptr() for of_rank in flags),
                rounds=torch.zeros(self.PROGRAMS, dtype=torch.int32, device=GPU),
                barrier_mailbox=box,
            )
            for box in boxes
        ]

    def share(self, work: Callable[[SharedMemory], T]) -> list[T]:
        """Like `run`."""
        self._each(self._shared(self._boxes_to_warm_up(), done=99), work)
        return self._each(self.shared, work)


def parts_of(num_ranks: int, num_rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(num_rows, size, device=GPU).to(dtype) for _ in range(num_ranks)]


def total_of(parts: list[Tensor]) -> Tensor:
    """In the order of ranks, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def assert_summed_and_normed(
    results: list[tuple[Tensor, Tensor]], parts: list[Tensor], rows: Tensor, weight: Tensor
) -> None:
    """The same bits on all ranks, each with a norm and the rows behind it."""
    normed, added = add_rms_norm(total_of(parts), rows.clone(), weight, EPS)
    for found_norm, found_rows in results:
        assert torch.equal(found_norm, results[0][0]) and torch.equal(found_rows, results[0][1])
        torch.testing.assert_close(found_rows, added)
        torch.testing.assert_close(found_norm, normed, rtol=1.6e-2, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5120), (3, 1024), (7, 112), (12, 4098)])
def test_one_shot_all_reduce_sums_all_ranks(
    num_ranks: int, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(num_ranks, 16, size, dtype.itemsize)
    for _ in range(5):  # both halves, more than once
        parts = parts_of(num_ranks, num_rows, size, dtype)

        def work(box: Mailbox, parts: list[Tensor] = parts) -> Tensor:
            return one_shot.all_reduce(parts[box.rank], box)

        results = ranks.run(work)
        for found in results:
            assert torch.equal(found, results[0])
            torch.testing.assert_close(found, total_of(parts))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5120), (3, 1024), (12, 112)])
def test_one_shot_all_reduce_with_rms_norm_matches_the_reference(
    num_ranks: int, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(num_ranks, 16, size, dtype.itemsize)
    weight = torch.rand(size, device=GPU).to(dtype)
    for _ in range(3):
        parts = parts_of(num_ranks, num_rows, size, dtype)
        rows = torch.randn(num_rows, size, device=GPU).to(dtype)

        def work(
            box: Mailbox, parts: list[Tensor] = parts, rows: Tensor = rows
        ) -> tuple[Tensor, Tensor]:
            return one_shot.all_reduce_norm(parts[box.rank], rows.clone(), weight, EPS, box)

        results = ranks.run(work)
        assert_summed_and_normed(results, parts, rows, weight)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 38), (5, 1), (33, 7)])
def test_one_shot_all_reduce_max_gives_the_maximum(
    num_ranks: int, num_rows: int, num_columns: int
) -> None:
    ranks = Ranks(num_ranks, 64, 2, 4)
    for _ in range(3):
        values = torch.randint(-(2**55), 2**55, (num_ranks, num_rows, 50), device=GPU)
        values = values[:, :, :num_columns]

        def work(box: Mailbox, values: Tensor = values) -> Tensor:
            return one_shot.all_reduce_max(values[box.rank], box)

        for maxima in ranks.run(work):
            assert torch.equal(maxima, values.amax(dim=(0, 2)))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "size", "k"), [(1, 5120, 2560), (16, 5120, 6400), (5, 112, 64), (8, 1024, 1536)]
)
def test_products_sent_to_peers_are_summed_by_the_receiving_norm(
    num_ranks: int, num_rows: int, size: int, k: int, dtype: torch.dtype
) -> None:
    ranks = Ranks(num_ranks, 16, size, dtype.itemsize)
    factor, bias = torch.rand(size, device=GPU).to(dtype), torch.randn(size, device=GPU).to(dtype)
    weights = [torch.randn(size, k, device=GPU).div(k**0.5).to(dtype) for _ in range(num_ranks)]
    spaces = [allocate_workspace([(size, k)], 16, GPU) for _ in range(num_ranks)]
    for _ in range(3):
        xs = [torch.randn(num_rows, k, device=GPU).to(dtype) for _ in range(num_ranks)]
        rows = torch.randn(num_rows, size, device=GPU).to(dtype)

        def work(box: Mailbox, xs: list[Tensor] = xs, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
            own, its_bias = rows.clone(), bias if box.rank == 0 else None
            x, weight, space = xs[box.rank], weights[box.rank], spaces[box.rank]
            linear(x, weight, its_bias, epilogue=Epilogue(mailbox=box), workspace=space)
            return one_shot.received_norm(own, factor, EPS, box)

        results = ranks.run(work)
        parts = [
            linear(x, weight, bias if rank == 0 else None, workspace=space)
            for rank, (x, weight, space) in enumerate(zip(xs, weights, spaces, strict=True))
        ]
        assert_summed_and_normed(results, parts, rows, factor)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 64), (5, 112), (50, 4096), (300, 1024), (77, 4096)]
)
def test_two_shot_all_reduce_and_gather_match_the_reference(
    num_ranks: int, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    ranks = SharingRanks(num_ranks)
    weight = torch.rand(size, device=GPU).to(dtype)
    for _ in range(3):
        parts = parts_of(num_ranks, num_rows, size, dtype)
        rows = torch.randn(num_rows, size, device=GPU).to(dtype)

        def add(shared: SharedMemory, parts: list[Tensor] = parts) -> Tensor:
            part = parts[shared.barrier_mailbox.rank]
            out = torch.empty_like(part)
            two_shot.all_reduce(out, part, shared)
            return out

        def add_norm(
            shared: SharedMemory, parts: list[Tensor] = parts, rows: Tensor = rows
        ) -> tuple[Tensor, Tensor]:
            out, own = torch.empty_like(rows), rows.clone()
            two_shot.all_reduce_norm(
                out, parts[shared.barrier_mailbox.rank], own, weight, EPS, shared
            )
            return out, own

        def gather_parts(shared: SharedMemory, parts: list[Tensor] = parts) -> Tensor:
            return gather.all_gather(parts[shared.barrier_mailbox.rank], shared)

        totals = ranks.share(add)
        for found in totals:
            assert torch.equal(found, totals[0])
            torch.testing.assert_close(found, total_of(parts))
        assert_summed_and_normed(ranks.share(add_norm), parts, rows, weight)
        for found in ranks.share(gather_parts):
            assert torch.equal(found, torch.cat(parts, dim=1))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_consecutive_mixed_exchanges_are_right_while_one_rank_is_late(num_ranks: int) -> None:
    """Exchanges of any number of rows follow each other without waiting, while one rank is late."""
    size, all_rows = 1536, (300, 5, 77, 16, 1, 120)
    ranks, few = SharingRanks(num_ranks), Ranks(num_ranks, 16, size, 2)
    parts = [parts_of(num_ranks, num_rows, size, torch.bfloat16) for num_rows in all_rows]

    def work(both: tuple[SharedMemory, Mailbox]) -> list[Tensor]:
        shared, box = both
        if box.rank == 1:
            torch.cuda._sleep(20_000_000)
        results: list[Tensor] = []
        for own in (of_ranks[box.rank] for of_ranks in parts):
            out = torch.empty_like(own)
            two_shot.all_reduce(out, own, shared)
            results += [out, one_shot.all_reduce(own[:16], box), gather.all_gather(own, shared)]
        return results

    def reserve(_box: Mailbox) -> list[Tensor]:
        return [torch.empty(num_bytes, dtype=torch.uint8, device=GPU) for num_bytes in room]

    # Each kernel is loaded, and memory for the results is there, before any waits for another.
    torch.cuda._sleep(1)
    room = [900_000] * 16 + [64 << 20]
    ranks._each(ranks.boxes, reserve)
    for own in parts:

        def alone(shared: SharedMemory, own: list[Tensor] = own) -> None:
            part = own[shared.barrier_mailbox.rank]
            two_shot.all_reduce(torch.empty_like(part), part, shared)

        def gather_own(shared: SharedMemory, own: list[Tensor] = own) -> None:
            gather.all_gather(own[shared.barrier_mailbox.rank], shared)

        ranks.share(alone)
        ranks.share(gather_own)
        few.run(lambda box, own=own: one_shot.all_reduce(own[box.rank][:16], box))
    for results in ranks._each(list(zip(ranks.shared, few.boxes, strict=True)), work):
        for of_ranks, total, start, whole in zip(
            parts, results[::3], results[1::3], results[2::3], strict=True
        ):
            torch.testing.assert_close(total, total_of(of_ranks))
            torch.testing.assert_close(start, total_of(of_ranks)[:16])
            assert torch.equal(whole, torch.cat(of_ranks, dim=1))


def test_captured_exchanges_are_right_in_every_replay() -> None:
    """Each replay is another exchange, which the device counts."""
    ranks = Ranks(2, 4, 1024, 2)
    parts = parts_of(2, 4, 1024, torch.bfloat16)

    def twice(box: Mailbox) -> Tensor:
        return one_shot.all_reduce(one_shot.all_reduce(parts[box.rank], box), box)

    ranks.run(lambda box: one_shot.all_reduce(parts[box.rank], box))
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
