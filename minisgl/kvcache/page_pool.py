"""The pages of a memory: which are free, which step wrote each, and what is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

SCRATCH_PAGE = 0  # of the device, for padded rows
UNPLANNED = 1 << 62  # written by a plan that is still being made


class PagePool:
    """A free list of the pages `first` .. num_pages - 1."""

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        self.num_pages = num_pages
        # [num_pages]: the last step whose launch, or whose plan, may have written the page
        self.written_by = [0] * num_pages
        self.settled = 0  # the last step that has succeeded
        self.on_free: Callable[[Sequence[int]], None] | None = None  # called with what is freed
        self.free_pages = list(range(num_pages - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free_pages)

    def take(self, count: int) -> list[int]:
        """Take free pages, of which there must be enough."""
        kept = len(self.free_pages) - count
        taken = self.free_pages[kept:]
        del self.free_pages[kept:]
        return taken

    def free(self, pages: Sequence[int]) -> None:
        self.free_pages.extend(pages)
        if self.on_free is not None:
            self.on_free(pages)

    def mark_written(self, pages: Iterable[int], step: int) -> None:
        for page in pages:
            self.written_by[page] = step

    def are_settled(self, pages: Iterable[int]) -> bool:
        """Whether the steps that wrote `pages` have succeeded."""
        return all(self.written_by[page] <= self.settled for page in pages)


class HostPool(PagePool):
    """Allocates host pages, and collects the offloads that the next plan carries."""

    def __init__(self, num_pages: int, *, piece: int = 1) -> None:
        """piece: number of device pages that are at least offloaded together, if there are as many.
        Larger pieces mean fewer nodes; smaller ones keep more on the device."""
        super().__init__(num_pages)
        self.piece = piece
        # What the next plan copies here: the number on the device by the host page.
        self.offloads: dict[int, int] = {}
        # What groups keep beside a page, by their indices: further pages, which leave with it.
        self.beside: dict[int, dict[int, int]] = {}
        self.frozen: set[int] = set()  # somebody reads them
        self.leaving: set[int] = set()  # frozen, and freed as soon as they are not

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """Take free pages, of which there must be enough, in the order of their numbers if they
        were never used."""
        taken = super().take(count)[::-1]
        self.mark_written(taken, 0)
        return taken

    def offload(self, pages: Sequence[int]) -> list[int]:
        """Copy device pages with the next plan; returns their host pages. Enough must be free."""
        taken = self.take(len(pages))
        self.offloads.update(zip(taken, pages, strict=True))
        self.mark_written(taken, UNPLANNED)
        return taken

    def offload_beside(self, numbers: Mapping[tuple[int, int], int]) -> None:
        """Copy what belongs beside host pages with the next plan: numbers of the device, by host
        page and index. Enough must be free."""
        taken = self.offload([*numbers.values()])
        for (host_page, index), further in zip(numbers, taken, strict=True):
            self.beside.setdefault(host_page, {})[index] = further

    def beside_of(self, host_page: int, indices: range) -> list[int]:
        """What is beside a page with these indices, if all of it is."""
        held = self.beside.get(host_page, {})
        return [held[index] for index in indices] if held.keys() >= {*indices} else []

    def drop_beside(self, host_page: int, indices: range) -> None:
        """Free what is beside a page with these indices."""
        held = self.beside.pop(host_page, {})
        self.free([held.pop(index) for index in indices if index in held])
        if held:
            self.beside[host_page] = held

    def with_beside(self, host_pages: Sequence[int]) -> list[int]:
        """Pages, and all that is beside them."""
        beside = (self.beside.get(host_page, {}).values() for host_page in host_pages)
        return [*host_pages, *chain.from_iterable(beside)]

    def free(self, host_pages: Sequence[int]) -> None:
        for host_page in reversed(host_pages):
            self.free([*self.beside.pop(host_page, {}).values()])
            if host_page in self.frozen:
                self.leaving.add(host_page)
            else:
                self.offloads.pop(host_page, None)
                self.free_pages.append(host_page)

    def freeze(self, host_pages: Iterable[int]) -> None:
        """Keep pages as they are until `thaw`, even if they are freed. None may be frozen."""
        self.frozen.update(host_pages)

    def thaw(self, host_pages: Iterable[int]) -> None:
        for host_page in host_pages:
            self.frozen.remove(host_page)
            if host_page in self.leaving:
                self.leaving.remove(host_page)
                self.free_pages.append(host_page)

    def take_offloads(self, step: int) -> tuple[tuple[int, int], ...]:
        """The (device page, host page) pairs for the plan of `step`."""
        offloads = tuple((page, host_page) for host_page, page in self.offloads.items())
        self.mark_written(self.offloads, step)
        self.offloads = {}
        return offloads
