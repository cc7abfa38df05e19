"""Pages of the KV cache, gathered into and scattered from a packed buffer.

On the device a page is one piece in each plane: the keys, or the values, of a layer. Packed it is
one piece in all, its planes one after the other, which is what a DMA is fast with. Both are copied
as bytes, whatever their dtype.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kernels.dispatch import runs_triton


def gather_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """Copy `pages` [n] int64 into the first n rows of `packed`, [at least n, page_bytes] uint8."""
    if runs_triton(pages.device):
        from minisgl.kernels.cache_pages import kernels

        kernels.gather_pages(planes, pages, packed)
        return
    rows = packed[: len(pages)].view(planes.word)
    first = 0
    for plane in planes.words:
        rows[:, first : first + plane.shape[1]] = plane[pages]
        first += plane.shape[1]


def scatter_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """Copy the first n rows of `packed`, as of `gather_pages`, to `pages` [n] int64.

    A page may occur twice only if it is the scratch page.
    """
    if runs_triton(pages.device):
        from minisgl.kernels.cache_pages import kernels

        kernels.scatter_pages(planes, pages, packed)
        return
    rows = packed[: len(pages)].view(planes.word)
    first = 0
    for plane in planes.words:
        plane[pages] = rows[:, first : first + plane.shape[1]]
        first += plane.shape[1]
