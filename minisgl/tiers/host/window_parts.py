"""The parts of pages of windowed layers, each as large as a page of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.device.copy_lanes import upload_pages
from minisgl.kernels.cache_pages.page_copies import gather_pages, scatter_pages
from minisgl.kernels.cache_pages.planes import Planes
from minisgl.tiers.host.numbering import Numbering


class WindowParts:
    def __init__(self, planes: Sequence[Tensor], numbering: Numbering) -> None:
        """planes: of windowed layers, if there are any."""
        self.planes = Planes.of(planes) if planes else None
        self._first, self._each = numbering.first_window_part, numbering.window_parts
        self._page_bytes = numbering.page_bytes

    def gather(self, numbers: Sequence[int], packed: Tensor) -> None:
        """Copy the parts among `numbers` into their rows of `packed`, [n, page_bytes] uint8."""
        rows = self._rows(numbers)
        if self.planes is not None and rows:
            pages, places = self._places([numbers[row] for row in rows])
            parts = self._gathered(self.planes, upload_pages(pages, packed.device))
            packed[upload_pages(rows, packed.device)] = parts[upload_pages(places, packed.device)]

    def scatter(self, numbers: Sequence[int], packed: Tensor) -> None:
        """Copy the rows of `packed` to the parts among `numbers`."""
        rows = self._rows(numbers)
        if self.planes is not None and rows:
            numbered, places = self._places([numbers[row] for row in rows])
            pages = upload_pages(numbered, packed.device)
            parts = self._gathered(self.planes, pages)  # the other parts of these pages stay
            parts[upload_pages(places, packed.device)] = packed[upload_pages(rows, packed.device)]
            whole = parts.view(len(numbered), -1)[:, : self.planes.page_bytes].contiguous()
            scatter_pages(self.planes, pages, whole)

    def _rows(self, numbers: Sequence[int]) -> list[int]:
        return [row for row, number in enumerate(numbers) if number >= self._first]

    def _places(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The pages of parts, and where the parts are among all parts of these."""
        each = self._each
        pages = [*dict.fromkeys((number - self._first) // each for number in numbers)]
        first_of = {page: at * each for at, page in enumerate(pages)}
        split = (divmod(number - self._first, each) for number in numbers)
        return pages, [first_of[page] + part for page, part in split]

    def _gathered(self, planes: Planes, pages: Tensor) -> Tensor:
        """The parts of pages, [parts, page_bytes]. Those of a page end in zeros."""
        shape = (len(pages), planes.page_bytes)
        whole = torch.empty(shape, dtype=torch.uint8, device=pages.device)
        gather_pages(planes, pages, whole)
        padding = self._each * self._page_bytes - planes.page_bytes
        return functional.pad(whole, (0, padding)).view(-1, self._page_bytes)
