"""A disk for tests: a page store in memory."""

from __future__ import annotations

from collections.abc import Sequence


class MemoryStore:
    """What was written stays, unless a test removes it."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.forgotten: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key in self.pages and key not in self.forgotten

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten.update(keys)

    def write(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        for key, page in zip(keys, pages, strict=True):
            self.pages[key] = bytes(page)
            self.forgotten.discard(key)
        return sum(map(len, pages))

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        for count, (key, view) in enumerate(zip(keys, into, strict=True)):
            if key not in self.pages:
                return count
            view[:] = self.pages[key]
        return len(keys)
