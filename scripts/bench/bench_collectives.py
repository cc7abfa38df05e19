"""Times the all-reduces and gathers of a tensor-parallel model, in CUDA graphs:

python scripts/bench/bench_collectives.py --tp 2


By the number of rows of --hidden bfloat16: an all-reduce with the norm after it, and the
collectives of sampling. The results are first compared with NCCL's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from graph_timer import graph_s
from rich.console import Console
from rich.table import Table
from torch.distributed import FileStore

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.peers import over_peer_memory
from minisgl.kernels.dispatch import add_rms_norm

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
REPEATS = 40  # sums in a graph
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=torch.cuda.device_count())
    parser.add_argument("--hidden", type=int, default=5120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            measure, (f"{folder}/store", options.tp, options.hidden), options.tp, daemon=True
        )


def measure(rank: int, meeting: str, num_ranks: int, hidden: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    nccl = GroupCommunicator(FileStore(meeting, -1), rank, num_ranks, device)
    ours = over_peer_memory(nccl, hidden, torch.bfloat16)
    table = Table("rows", "NCCL, norm", "ours", "logits of 151,936: NCCL", "ours", "maximum")
    for num_rows in ROWS:
        cells = [
            *(f"{time_sums(way, num_rows, hidden, nccl):.1f} µs" for way in (nccl, ours)),
            *(
                f"{time_gathers(way, num_rows, 151_936 // num_ranks, nccl):.1f} µs"
                if num_rows <= 256
                else ""
                for way in (nccl, ours)
            ),
            f"{time_maxima(ours, num_rows, nccl):.1f} µs" if num_rows <= 512 else "",
        ]
        table.add_row(str(num_rows), *cells)
    if rank == 0:
        Console(width=110).print(table)
    nccl.close()


def time_sums(way: Communicator, num_rows: int, hidden: int, nccl: GroupCommunicator) -> float:
    """µs of a sum and the norm behind it."""
    device = nccl.device
    part = torch.randn(num_rows, hidden, device=device).bfloat16()
    torch.manual_seed(1)
    rows = torch.randn(num_rows, hidden, device=device).bfloat16()
    weight = torch.rand(hidden, device=device).bfloat16()
    torch.manual_seed(nccl.rank + num_rows)
    atol = 1e-1 if way is nccl else 2e-2
    # Rounded once, which NCCL's sums of halves are not.
    total = nccl.all_reduce(part.float()).bfloat16()
    wanted = add_rms_norm(total, rows.clone(), weight, EPS)
    for _ in range(3):
        found = way.all_reduce_norm(part.clone(), rows.clone(), weight, EPS)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=atol)
    torch.testing.assert_close(way.all_reduce(part.clone()), total, rtol=2e-2, atol=atol)

    def work() -> None:
        own = part
        for _ in range(REPEATS):
            own, _rows = way.all_reduce_norm(own, rows, weight, EPS)

    return time_graph(work, nccl) / REPEATS


def time_gathers(way: Communicator, num_rows: int, width: int, nccl: GroupCommunicator) -> float:
    part = torch.randn(num_rows, width, device=nccl.device).bfloat16()
    assert torch.equal(way.all_gather(part), nccl.all_gather(part))

    def work() -> None:
        for _ in range(4):
            way.all_gather(part)

    return time_graph(work, nccl) / 4


def time_maxima(way: Communicator, num_rows: int, nccl: GroupCommunicator) -> float:
    values = torch.randint(-(2**55), 2**55, (num_rows, 40), device=nccl.device)
    assert torch.equal(way.all_reduce_max(values), nccl.all_reduce_max(values))

    def work() -> None:
        for _ in range(REPEATS):
            way.all_reduce_max(values)

    return time_graph(work, nccl) / REPEATS


def time_graph(work: Callable[[], None], nccl: GroupCommunicator) -> float:
    """µs of a replay; all ranks begin a round together."""
    return 1e6 * graph_s([work], rounds=5, replays=5, before=partial(nccl.host_min, 0))


if __name__ == "__main__":
    main()
