"""Page ids and who may hand them out."""

from __future__ import annotations

from collections.abc import Sequence

SCRATCH_PAGE = 0


class PageAllocator:
    """A free list of the pages 1 .. num_pages - 1; page 0 is scratch for padded rows."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        return self._free

    def allocate(self, count: int) -> list[int]:
        """The caller has made sure that `count` pages are free."""
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)
