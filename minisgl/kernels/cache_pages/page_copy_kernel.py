"""Both directions of page_copies.py as one kernel, at the speed of the device's memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.cache_pages.planes import Planes

_BLOCK = 1024  # words of a program


def gather_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """See page_copies.py."""
    _launch(planes, pages, packed, gather=True)


def scatter_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """See page_copies.py."""
    _launch(planes, pages, packed, gather=False)


def _launch(planes: Planes, pages: Tensor, packed: Tensor, *, gather: bool) -> None:
    if len(pages) == 0:
        return
    num_planes = len(planes.words)
    _copy_pages[(len(pages), num_planes, triton.cdiv(planes.longest, _BLOCK))](
        planes.table,
        pages,
        packed.view(planes.word),
        planes.page_words,
        num_planes=num_planes,
        gather=gather,
        block=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _copy_pages(
    table,
    pages,
    packed,
    page_words,
    num_planes: tl.constexpr,
    gather: tl.constexpr,
    block: tl.constexpr,
):
    """One program copies a block of one page of one plane."""
    row = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1)
    page = tl.load(pages + row)
    size = tl.load(table + num_planes + plane)
    paged = tl.load(table + plane).to(packed.dtype) + page * size
    flat = packed + row * page_words + tl.load(table + 2 * num_planes + plane)
    at = tl.program_id(2) * block + tl.arange(0, block)
    there = at < size
    if gather:
        tl.store(flat + at, tl.load(paged + at, mask=there), mask=there)
    else:
        tl.store(paged + at, tl.load(flat + at, mask=there), mask=there)
