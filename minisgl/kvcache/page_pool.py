"""The pages of a memory: which are free, and which step wrote each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

SCRATCH_PAGE = 0  # of the device, for padded rows


class PagePool:
    """A free list of the pages `first` .. num_pages - 1."""

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        self.num_pages = num_pages
        # [num_pages]: the last step whose launch, or whose plan, may have written the page
        self.written_by = [0] * num_pages
        self.settled = 0  # the last step that has succeeded
        self.on_free: Callable[[Sequence[int]], None] | None = None  # called with what is freed
        self._free = list(range(num_pages - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        """The pages without an owner."""
        return self._free

    def take(self, count: int) -> list[int]:
        """Take free pages, of which there must be enough."""
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)
        if self.on_free is not None:
            self.on_free(pages)

    def mark_written(self, pages: Iterable[int], step: int) -> None:
        for page in pages:
            self.written_by[page] = step

    def are_settled(self, pages: Iterable[int]) -> bool:
        """Whether the steps that wrote `pages` have succeeded."""
        return all(self.written_by[page] <= self.settled for page in pages)
