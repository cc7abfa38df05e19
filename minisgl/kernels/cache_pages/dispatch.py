"""Pages of the KV cache, gathered into and scattered from a packed buffer.

On the device a page is one piece in each *plane*: the keys, or the values, of a layer. Packed it is
one piece in all, its planes one after the other, which is what a DMA is fast with. Both are copied
as bytes, whatever their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a KV cache, each [num_pages, ...], contiguous, of any dtype.

    A word is the widest integer that divides the pages of every plane.
    """

    words: tuple[Tensor, ...]  # the same memory as words: [num_pages, words of a page]
    table: Tensor  # [3, num_planes] int64: address, words of a page, first word in a packed page
    page_words: int  # of a packed page
    word: torch.dtype

    @staticmethod
    def of(planes: Sequence[Tensor]) -> Planes:
        sizes = [plane[0].nbytes for plane in planes]
        word_bytes = math.gcd(8, *sizes)
        word = _WORDS[word_bytes]
        words = tuple(plane.view(len(plane), -1).view(torch.uint8).view(word) for plane in planes)
        addresses, lengths, firsts, end = [], [], [], 0
        for plane in words:
            addresses.append(plane.data_ptr())
            lengths.append(plane.shape[1])
            firsts.append(end)
            end += plane.shape[1]
        table = torch.tensor([addresses, lengths, firsts], dtype=torch.int64)
        return Planes(words, table.to(planes[0].device), end, word)

    @property
    def page_bytes(self) -> int:
        """Of a packed page."""
        return self.page_words * self.word.itemsize


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
