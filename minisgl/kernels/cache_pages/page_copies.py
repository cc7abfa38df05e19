"""Pages of the KV cache, gathered into and scattered from a packed buffer.

On the device a page is one piece in each plane: the keys, or the values, of a layer. Packed it is
one piece in all, its planes one after the other, which is what a DMA is fast with. Both are copied
as bytes, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from minisgl.kernels.cache_pages.planes import Planes
from minisgl.kernels.dispatch import runs_triton


def gather_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """Copy `pages` [n] int64 into the first n rows of `packed`, [at least n, page_bytes] uint8."""
    if runs_triton(pages.device):
        from minisgl.kernels.cache_pages import page_copy_kernel

        page_copy_kernel.gather_pages(planes, pages, packed)
        return
    for plane, part in _parts(planes, packed[: len(pages)]):
        part[:] = plane[pages]


def scatter_pages(planes: Planes, pages: Tensor, packed: Tensor) -> None:
    """Copy the first n rows of `packed`, as of `gather_pages`, to `pages` [n] int64.

    A page may occur twice only if it is the scratch page.
    """
    if runs_triton(pages.device):
        from minisgl.kernels.cache_pages import page_copy_kernel

        page_copy_kernel.scatter_pages(planes, pages, packed)
        return
    for plane, part in _parts(planes, packed[: len(pages)]):
        plane[pages] = part


def _parts(planes: Planes, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each plane [num_pages, words], and its part [n, words] of packed pages."""
    sizes = [plane.shape[1] for plane in planes.words]
    return zip(planes.words, packed.view(planes.word).split(sizes, dim=1), strict=True)
