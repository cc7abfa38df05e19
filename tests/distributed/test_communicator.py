"""Collectives of the communicators, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
from support.forked_ranks import fork_server
from torch.distributed import FileStore

from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.distributed.group import join_group
from minisgl.distributed.layout import RankLayout
from minisgl.distributed.peer_memory import Exported, PeerMemory, PeerMemoryError
from minisgl.kernels.elementwise.reference import add_rms_norm

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
    torch.testing.assert_close(ranks.all_reduce(own.clone()), total)

    rows, weight = part_of(100), torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7))
    found = ranks.all_reduce_norm(own.clone(), rows.clone(), weight, 1e-6)
    torch.testing.assert_close(found, add_rms_norm(total, rows, weight, 1e-6))

    assert torch.equal(ranks.all_gather(own), torch.cat(parts, dim=1))

    best = [(part * 2**40).long() for part in parts]
    assert torch.equal(ranks.all_reduce_max(best[ranks.rank]), torch.stack(best).amax(dim=(0, 2)))

    # As of the pages that each has room for.
    assert ranks.host_min(1000 - ranks.rank) == 1001 - ranks.size


class Unreachable(PeerMemory):
    """Without a driver. One rank cannot map what the others give."""

    def __init__(self, rank: int) -> None:
        self.error = None
        self._rank = rank

    def export(self, tensor: torch.Tensor) -> Exported:
        return Exported(b"", 0)

    def _map(self, exported: Exported) -> int:
        if self._rank == 1:
            raise PeerMemoryError("no way there")
        return 77


def check_memory_out_of_reach(rank: int) -> None:
    """The others are not left waiting, and can be told."""
    memory, own = Unreachable(rank), torch.zeros(1)
    for _ in range(2):
        found = memory.addresses(own, rank, NUM_RANKS)
        others = [found[other] for other in range(NUM_RANKS) if other != rank]
        assert others == [0 if rank == 1 else 77] * (NUM_RANKS - 1)
    assert (memory.error is not None) == (rank == 1)


def check_rank(rank: int, meeting: Path) -> None:
    store = FileStore(str(meeting), -1)
    dtype = torch.float32
    layout = RankLayout(tp=NUM_RANKS)
    ranks, _ = join_group(store, rank, layout, CPU, hidden_size=HIDDEN, dtype=dtype, plain=False)
    assert (ranks.rank, ranks.size) == (rank, NUM_RANKS)
    check(ranks)
    check_memory_out_of_reach(rank)
    ranks.close()


def test_a_single_rank_communicator_is_the_identity() -> None:
    check(SINGLE_RANK)


def test_collectives_give_every_rank_the_same_result(tmp_path: Path) -> None:
    fork_server()
    torch.multiprocessing.start_processes(
        check_rank, (tmp_path / "store",), NUM_RANKS, start_method="forkserver"
    )
