"""Kernels that wait for those of other ranks, in Triton's interpreter. tests/gpu has more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.interpreted_ranks import MAX_ROWS, run_ranks

from minisgl.kernels.comm import gather, one_shot, two_shot
from minisgl.kernels.comm.shared_memory import SharedMemory
from minisgl.kernels.elementwise import reference

SIZE, EPS = 12, 1e-6
ROWS = (3, 21, 1)  # of exchanges that follow each other: less than a round, several, one


def parts_of(num_ranks: int, num_rows: int) -> Tensor:
    random = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_ranks, num_rows, SIZE, generator=random)


def rows_and_weight(num_rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(-num_rows)
    return torch.randn(num_rows, SIZE, generator=random), torch.rand(SIZE, generator=random)


def numbers_of(num_ranks: int) -> Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randint(-(2**55), 2**55, (num_ranks, MAX_ROWS, 5), generator=random)


def exchange(shared: SharedMemory) -> list[list[float]]:
    """The sums, norms, streams and gathered columns of all exchanges, and then maxima."""
    rank, num_ranks = shared.barrier_mailbox.rank, shared.barrier_mailbox.num_ranks
    results = []
    for num_rows in ROWS:
        part = parts_of(num_ranks, num_rows)[rank].contiguous()
        (rows, weight), out, normed = rows_and_weight(num_rows), *torch.empty(2, num_rows, SIZE)
        two_shot.all_reduce(out, part, shared)
        two_shot.all_reduce_norm(normed, part, rows, weight, EPS, shared)
        results += [out, normed, rows, gather.all_gather(part, shared)]
    results.append(one_shot.all_reduce_max(numbers_of(num_ranks)[rank], shared.barrier_mailbox))
    return [each.tolist() for each in results]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_wait_for_each_other_exchange_their_rows(num_ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(num_ranks, exchange, tmp_path):
        results = [torch.tensor(each) for each in found]
        assert torch.equal(results.pop(), numbers_of(num_ranks).amax(dim=(0, 2)))
        for i, num_rows in enumerate(ROWS):
            total, normed, rows, gathered = results[4 * i : 4 * i + 4]
            parts, (before, weight) = parts_of(num_ranks, num_rows), rows_and_weight(num_rows)
            assert torch.equal(total, sum(parts[1:], start=parts[0]))  # in the order of ranks
            expected_norm, expected_rows = reference.add_rms_norm(total, before, weight, EPS)
            torch.testing.assert_close(rows, expected_rows)
            torch.testing.assert_close(normed, expected_norm)
            assert torch.equal(gathered, torch.cat(list(parts), dim=1))
