"""The planes of a KV cache: where the parts of a page are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a KV cache, each [num_pages, ...], contiguous, of any dtype.

    A word is the widest integer that divides the pages of every plane.
    """

    words: tuple[Tensor, ...]  # the same memory as words: [num_pages, words of a page]
    table: Tensor  # [3, num_planes] int64: address, words of a page, first word in a packed page
    page_words: int  # of a packed page
    longest: int  # words of a page of any plane, at most
    word: torch.dtype

    @staticmethod
    def of(planes: Sequence[Tensor]) -> Planes:
        sizes = [plane[0].nbytes for plane in planes]
        word_bytes = math.gcd(8, *sizes)
        word = _WORDS[word_bytes]
        words = tuple(plane.view(len(plane), -1).view(torch.uint8).view(word) for plane in planes)
        lengths, firsts, end = [], [], 0
        for plane in words:
            lengths.append(plane.shape[1])
            firsts.append(end)
            end += plane.shape[1]
        table = torch.tensor([_addresses(words), lengths, firsts], dtype=torch.int64)
        return Planes(words, table.to(planes[0].device), end, max(lengths), word)

    def find(self) -> None:
        """Note where the planes are, which have given their memory back and taken it again."""
        self.table[0] = torch.tensor(_addresses(self.words), dtype=torch.int64)

    @property
    def page_bytes(self) -> int:
        """Of a packed page."""
        return self.page_words * self.word.itemsize


def _addresses(words: Sequence[Tensor]) -> list[int]:
    return [plane.data_ptr() for plane in words]
