"""All ranks' columns side by side; see one_shot.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.comm.mailbox import after, pointer
from minisgl.kernels.comm.shared_memory import SharedMemory, barrier


def all_gather(part: Tensor, shared: SharedMemory) -> Tensor:
    """All ranks' `part` [num_rows, width] side by side: [num_rows, ranks · width], a new tensor.

    part: of at most as many bytes as the shared memory; its rows are a multiple of 4 bytes.
    """
    rank, num_ranks = shared.barrier_mailbox.rank, shared.barrier_mailbox.num_ranks
    shared.own[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    barrier(shared)
    whole = part.new_empty((part.shape[0], num_ranks * part.shape[1]))
    num_words = whole.view(torch.int32).shape[1] // num_ranks
    block = 4096
    _gather_row[(triton.cdiv(num_words, block), num_ranks, part.shape[0])](
        whole.view(torch.int32),
        after(rank, shared.addresses),
        num_words,
        rank,
        block=block,
        num_warps=8,
    )
    barrier(shared)  # nobody writes there before all have read
    return whole


@triton.jit(do_not_specialize=["num_words", "rank"])
def _gather_row(whole, targets, num_words, rank, block: tl.constexpr):
    """A part of a row of one rank. Past the L1 cache, which does not see what others write."""
    word = tl.program_id(0) * block + tl.arange(0, block)
    step, num_ranks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    inside = word < num_words
    address = targets[0]
    for other in tl.static_range(1, len(targets)):
        address = tl.where(step == other, targets[other], address)
    part = pointer(address, tl.int32)
    words = tl.load(part + row * num_words + word, mask=inside, other=0, cache_modifier=".cg")
    place = (row * num_ranks + (rank + 1 + step) % num_ranks) * num_words + word
    tl.store(whole + place, words, mask=inside)
