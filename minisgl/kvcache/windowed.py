"""Windowed layers as a group of pages beside the full ones of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.kvcache.lease import Lease
from minisgl.kvcache.residency import Device
from minisgl.kvcache.tree import Found, PrefixTree
from minisgl.kvcache.windows import WindowPages, Windows


class WindowGroup:
    """A lease has, beside each full page, a page of windowed layers, until it is behind their
    window."""

    def __init__(self, windows: Windows, tree: PrefixTree, device: Device) -> None:
        self._windows = windows
        self._tree = tree
        self._device = device
        device.pool.on_free = windows.forget

    def _full_pages(self, found: Found) -> list[int]:
        pages = self._device.pages
        return [page for node, common in found for page in pages[node][:common]]

    def usable(self, found: Found, num_pages: int) -> int:
        return self._windows.usable(self._full_pages(found)[:num_pages])

    def open(self, lease: Lease, ends: Iterable[int]) -> None:
        lease.windows = self._windows.open(lease.pages)

    def claim(self, lease: Lease, num_tokens: int) -> bool:
        return self._windows.claim(_pages_of(lease), num_tokens)

    def commit(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        """Let the cache keep what the lease has, whose last page a launched chunk ends in, and
        give up what is behind the window."""
        held = _pages_of(lease)
        self._share(lease, key, num_pages, step)
        self._windows.trim(held, held.end)

    def _share(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        *_, root = lease.node.upwards()
        full_pages = self._full_pages(self._tree.below(root, key, 0, num_pages))
        self._windows.share(_pages_of(lease), full_pages, step)

    def close(self, lease: Lease, key: bytes, num_pages: int, step: int) -> None:
        self._share(lease, key, num_pages, step)
        self._windows.close(_pages_of(lease))

    def drop_written_since(self, step: int) -> None:
        self._windows.drop_written_since(step)

    def audit(self, leases: Sequence[Lease], launched: int) -> None:
        cached = [page for run in self._device.pages.values() for page in run]
        self._windows.audit([_pages_of(lease) for lease in leases], cached, launched)
        assert all(_pages_of(lease).end <= len(lease.pages) for lease in leases)


def _pages_of(lease: Lease) -> WindowPages:
    assert lease.windows is not None
    return lease.windows
