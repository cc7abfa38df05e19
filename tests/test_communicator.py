"""What ranks tell each other, in real processes over gloo."""

from __future__ import annotations

import torch
from torch.distributed import TCPStore

from minisgl.distributed.communicator import ALONE, Communicator
from minisgl.distributed.group import join_group
from minisgl.kernels.reference import add_rms_norm

NUM_RANKS = 3
HIDDEN = 12
CPU = torch.device("cpu")


def part_of(rank: int, num_rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_rows, HIDDEN, generator=generator)


def check(ranks: Communicator) -> None:
    parts = [part_of(rank) for rank in range(ranks.size)]
    total = torch.stack(parts).sum(0)
    own = parts[ranks.rank]
    torch.testing.assert_close(ranks.sum(own.clone()), total)

    rows, weight = part_of(100), torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7))
    found = ranks.sum_norm(own.clone(), rows.clone(), weight, 1e-6)
    torch.testing.assert_close(found, add_rms_norm(total, rows, weight, 1e-6))

    assert torch.equal(ranks.gather(own), torch.cat(parts, dim=1))

    best = [(part * 2**40).long() for part in parts]
    assert torch.equal(ranks.maximum(best[ranks.rank]), torch.stack(best).amax(dim=(0, 2)))

    # As of the pages that each has room for.
    assert ranks.smallest(1000 - ranks.rank) == 1001 - ranks.size


def check_rank(rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    dtype = torch.float32
    ranks = join_group(store, rank, NUM_RANKS, CPU, hidden_size=HIDDEN, dtype=dtype, plain=False)
    assert (ranks.rank, ranks.size) == (rank, NUM_RANKS)
    check(ranks)
    ranks.close()


def test_one_rank_is_enough_for_itself() -> None:
    check(ALONE)


def test_several_ranks_agree() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(check_rank, (store.port,), NUM_RANKS)
