"""Kernels of the cases `launches` of bench_kernels.py: links of a chain of launches, and barriers
of a whole grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.launch_options import pdl_options

MOST_POLLS = 1 << 20  # of all barriers together, in place of hanging


def run_chain(
    grids: Sequence[tuple[int, int]], held: int, trigger: str, buffers: Sequence[Tensor]
) -> Tensor:
    """Launches one kernel for each (programs, warps). Each reads, after its wait, what the last
    program of the launch before it has written, and writes one more. Returns what the last launch
    wrote, the number of launches everywhere.

    held: int32 numbers that a thread loads before the wait and uses after it. trigger: whether the
    next launch may start after the wait (`late`), before it (`early`), or at the end (`apart`).
    buffers: zeros; zeros for all that a program holds; and two for results, all with a place for
    each program.
    """
    source, zeros, *results = buffers
    options = pdl_options(source.device, trigger != "apart")
    last, programs = 0, 0
    for i, (programs, warps) in enumerate(grids):
        threads, early = 32 * warps, trigger == "early"
        _link[(programs,)](
            results[i % 2], source, zeros, last, held * threads, early, num_warps=warps, **options
        )
        source, last = results[i % 2], programs - 1
    return source[:programs]


@triton.jit(do_not_specialize=["last"])
def _link(out, source, zeros, last, held: tl.constexpr, early: tl.constexpr, pdl: tl.constexpr):
    if pdl and early:
        tl.extra.cuda.gdc_launch_dependents()
    if held > 0:
        weights = tl.load(zeros + tl.arange(0, held))
    if pdl:
        tl.extra.cuda.gdc_wait()
        if not early:
            tl.extra.cuda.gdc_launch_dependents()
    found = tl.load(source + last)
    result = found + 1
    if held > 0:
        result += tl.max(weights & found)  # 0
    tl.store(out + tl.program_id(0), result)


def run_barriers(programs: int, rounds: int, by_load: bool) -> Tensor:
    """[programs] int32: in how many of the rounds a program found, behind the barrier, what its
    neighbour had written before it. by_load: how it polls: by loads that acquire, or by atomics."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counter, *written, found = torch.zeros((4, programs), dtype=torch.int32, device=device)
    _barriers[(programs,)](
        counter, *written, found, rounds, MOST_POLLS, programs, by_load, num_warps=8
    )
    return found


@triton.jit(do_not_specialize=["rounds"])
def _barriers(
    counter, even, odd, found, rounds, most_polls, programs: tl.constexpr, by_load: tl.constexpr
):
    """All programs must be resident at once."""
    mine = tl.program_id(0)
    neighbour = (mine + 1) % programs
    right = 0
    polls = 0
    for i in range(1, rounds + 1):
        # Two places in turn: a neighbour may be a round ahead.
        place = even if i % 2 == 0 else odd
        tl.store(place + mine, i)
        tl.debug_barrier()  # one thread does the atomic, which releases the stores of all
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        while (_acquired(counter, by_load) < i * programs) & (polls < most_polls):
            polls += 1
        right += (tl.load(place + neighbour) == i).to(tl.int32)
    tl.store(found + mine, right)


@triton.jit
def _acquired(counter, by_load: tl.constexpr):
    if by_load:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];",
            "=r,l",
            [counter],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
