"""Ranks whose kernels wait for each other in Triton's interpreter.

Each is a process, since the interpreter runs one kernel of a process at a time. Their memory is in
files that all of them map.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from support import interpreter
from torch import Tensor

from minisgl.kernels.comm.mailbox import Mailbox
from minisgl.kernels.comm.shared_memory import SharedMemory

PROGRAMS, MAX_ROWS = 2, 4
_INBOX, _FLAGS, _OWN = 1 << 12, 1 << 12, 1 << 14  # bytes

T = TypeVar("T")


def run_ranks(num_ranks: int, work: Callable[[SharedMemory], T], folder: Path) -> list[T]:
    """`work` of all ranks at once, in any order; of a single one in this process. The results must
    be picklable, and `work` a function of a module."""
    paths = [folder / str(rank) for rank in range(num_ranks)]
    for path in paths:
        path.write_bytes(bytes(_INBOX + _FLAGS + _OWN))
    if num_ranks == 1:
        return [_with_memory(work, paths, 0)]
    with multiprocessing.get_context("spawn").Pool(num_ranks, interpreter.mend, (setattr,)) as pool:
        # The first error ends all: the other ranks would wait for that one.
        calls = pool.imap_unordered(partial(_with_memory, work, paths), range(num_ranks))
        return list(calls)


def _with_memory(work: Callable[[SharedMemory], T], paths: list[Path], rank: int) -> T:
    memory = [_mapped(path) for path in paths]  # until the work is done
    return work(_shared(memory, rank))


def _shared(memory: list[Tensor], rank: int) -> SharedMemory:
    """A rank's part of all ranks' memory, with a mailbox of MAX_ROWS rows."""
    inboxes, flags, own = zip(*(each.split([_INBOX, _FLAGS, _OWN]) for each in memory), strict=True)
    mailbox = Mailbox(
        _as_shape(inboxes[rank], torch.int64, (2, len(memory), MAX_ROWS, 2)),
        tuple(inbox.data_ptr() for inbox in inboxes),
        torch.zeros(MAX_ROWS, dtype=torch.int32),
        rank,
    )
    return SharedMemory(
        own[rank],
        tuple(each.data_ptr() for each in own),
        _as_shape(flags[rank], torch.int32, (2, PROGRAMS, len(memory))),
        tuple(each.data_ptr() for each in flags),
        torch.zeros(PROGRAMS, dtype=torch.int32),
        mailbox,
    )


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def _as_shape(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return memory.view(dtype)[: torch.Size(shape).numel()].view(shape)
