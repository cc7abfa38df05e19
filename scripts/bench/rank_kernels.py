"""Cases of bench_kernels.py: collectives of a tensor-parallel model, by NCCL and by our kernels.

`sum and norm` is an all-reduce of bfloat16 rows with the norm behind it; the gather and the maximum
are those of sampling. Each is first compared with NCCL's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from kernel_timer import DEVICE, DTYPE, Call, Case, Problem, Report, graph_s
from torch.distributed import FileStore

from minisgl.distributed.communicator import Communicator, GroupCommunicator
from minisgl.distributed.peers import over_peer_memory
from minisgl.kernels.dispatch import add_rms_norm

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
REPEATS, GATHERS, ROUNDS = 40, 4, 5  # the former in a graph
HIDDEN_SIZE, VOCAB_SIZE, EPS = 5120, 151_936, 1e-6


def time_collectives(
    num_ranks: int, rows: Sequence[int] | None, kernels: Sequence[str] | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", num_ranks, rows or ROWS, kernels)
        torch.multiprocessing.spawn(measure, given, num_ranks, daemon=True)


def measure(
    rank: int, meeting: str, num_ranks: int, rows: Sequence[int], kernels: Sequence[str] | None
) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    nccl = GroupCommunicator(FileStore(meeting, -1), rank, num_ranks, device)
    ours = over_peer_memory(nccl, HIDDEN_SIZE, DTYPE)
    # All ranks begin a round together, and a failure of one is that of all.
    clock = partial(graph_s, replays=5, before=partial(nccl.host_min, 0))
    write: Callable[[str], object] = partial(print, flush=True) if rank == 0 else str
    Report(None, kernels, clock=clock, write=write, passed_over=()).run(cases(nccl, ours, rows))
    nccl.close()


def cases(nccl: Communicator, ours: Communicator, rows: Sequence[int]) -> Iterator[Case]:
    width = VOCAB_SIZE // nccl.size
    for m in rows:
        ways = {"NCCL": nccl, "minisgl": ours}
        yield Case(f"sum and norm of {HIDDEN_SIZE}, {m} rows", partial(sums, nccl, ways, m))
        if m <= 256:
            yield Case(f"gather of {VOCAB_SIZE}, {m} rows", partial(gathers, nccl, ways, m, width))
        if m <= 512:
            yield Case(f"maximum of 40, {m} rows", partial(maxima, nccl, {"minisgl": ours}, m))


def sums(nccl: Communicator, ways: dict[str, Communicator], m: int) -> Problem:
    part = torch.randn(m, HIDDEN_SIZE, device=DEVICE).to(DTYPE)
    torch.manual_seed(1)
    rows = torch.randn(m, HIDDEN_SIZE, device=DEVICE).to(DTYPE)
    weight = torch.rand(HIDDEN_SIZE, device=DEVICE).to(DTYPE)
    torch.manual_seed(nccl.rank + m)
    # Rounded once, which NCCL's sums of halves are not.
    total = nccl.all_reduce(part.float()).to(DTYPE)
    wanted = add_rms_norm(total, rows.clone(), weight, EPS)

    def calls(way: Communicator) -> Sequence[Call]:
        atol = 1e-1 if way is nccl else 2e-2
        for _ in range(3):
            found = way.all_reduce_norm(part.clone(), rows.clone(), weight, EPS)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=atol)
        torch.testing.assert_close(way.all_reduce(part.clone()), total, rtol=2e-2, atol=atol)

        def work() -> None:
            own = part
            for _ in range(REPEATS):
                own, _rows = way.all_reduce_norm(own, rows, weight, EPS)

        return [work]

    by_name = {name: partial(calls, way) for name, way in ways.items()}
    return Problem(calls=by_name, repeats=REPEATS, rounds=ROUNDS)


def gathers(nccl: Communicator, ways: dict[str, Communicator], m: int, width: int) -> Problem:
    part = torch.randn(m, width, device=DEVICE).to(DTYPE)

    def calls(way: Communicator) -> Sequence[Call]:
        assert torch.equal(way.all_gather(part), nccl.all_gather(part))
        return [partial(way.all_gather, part)] * GATHERS

    by_name = {name: partial(calls, way) for name, way in ways.items()}
    return Problem(calls=by_name, rounds=ROUNDS)


def maxima(nccl: Communicator, ways: dict[str, Communicator], m: int) -> Problem:
    values = torch.randint(-(2**55), 2**55, (m, 40), device=DEVICE)

    def calls(way: Communicator) -> Sequence[Call]:
        assert torch.equal(way.all_reduce_max(values), nccl.all_reduce_max(values))
        return [partial(way.all_reduce_max, values)] * REPEATS

    by_name = {name: partial(calls, way) for name, way in ways.items()}
    return Problem(calls=by_name, rounds=ROUNDS)
