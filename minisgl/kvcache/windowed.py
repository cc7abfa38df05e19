"""The KV cache of models some of whose layers see a window only: two kinds of pages in a lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.config import WindowSizes
from minisgl.kvcache.manager import KVCacheManager, Lease
from minisgl.kvcache.windows import Windows


class WindowedCacheManager(KVCacheManager):
    """Leases on pages of full layers, and beside each a page of windowed layers, until it is behind
    their window."""

    windows: Windows

    def __init__(
        self, *, num_window_pages: int, sizes: WindowSizes, num_pages: int, cache_type: str
    ) -> None:
        super().__init__(num_pages=num_pages, page_size=sizes.page_size, cache_type=cache_type)
        self.windows = Windows(num_window_pages, sizes)
        self._device.on_free = self.windows.forget

    def match(self, key: bytes, num_tokens: int, namespace: bytes = b"") -> int:
        return self._usable(key, num_tokens, namespace) * self.page_size

    def _usable(self, key: bytes, num_tokens: int, namespace: bytes) -> int:
        max_pages = self._cache.max_match(num_tokens)
        return self.windows.usable(self._cache.find(key, max_pages, namespace))

    def acquire(
        self, key: bytes, num_tokens: int, namespace: bytes = b"", *, reuse: bool = True
    ) -> Lease:
        num_pages = self._usable(key, num_tokens, namespace) if reuse else 0
        lease = super().acquire(key, num_pages * self.page_size + 1, namespace, reuse=reuse)
        lease.windows = self.windows.open(lease.pages)
        return lease

    def reserve(self, lease: Lease, num_tokens: int, **of_plan: Any) -> Sequence[int] | None:
        """Grow the lease; returns None if the pages of either kind are too few."""
        assert lease.windows is not None
        if not self.windows.claim(lease.windows, num_tokens):
            return None
        return super().reserve(lease, num_tokens, **of_plan)

    def commit(self, lease: Lease, key: bytes, num_tokens: int, step: int) -> None:
        """Share the first pages of a lease, whose last page a launched chunk ends in."""
        super().commit(lease, key, num_tokens, step)
        self._share(lease, key, num_tokens, step)
        assert lease.windows is not None
        self.windows.trim(lease.windows, lease.windows.end)

    def close(self, lease: Lease, key: bytes = b"", num_tokens: int = 0, step: int = 0) -> None:
        super().close(lease, key, num_tokens, step)
        self._share(lease, key, num_tokens, step)
        assert lease.windows is not None
        self.windows.close(lease.windows)

    def _share(self, lease: Lease, key: bytes, num_tokens: int, step: int) -> None:
        """Let the cache keep what the lease has beside the first pages of `key`."""
        assert lease.windows is not None
        *_, root = lease.node.upwards()
        full_pages = self._cache.find(key, num_tokens // self.page_size, namespace=root.key)
        self.windows.share(lease.windows, full_pages, step)

    def drop_written_since(self, step: int) -> None:
        super().drop_written_since(step)
        self.windows.drop_written_since(step)

    def audit(self, launched: int) -> None:
        super().audit(launched)
        held = [lease.windows for lease in self._leases if lease.windows is not None]
        assert len(held) == len(self._leases)
        self.windows.audit(held, self._cache.pages(), launched)
        for lease in self._leases:
            assert lease.windows is not None and lease.windows.end <= len(lease.pages)
