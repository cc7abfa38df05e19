"""Images that were processed lately: the next turn of a conversation has them again."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

from minisgl.images.picture import Picture

KEPT_BYTES = 512 << 20


class KeptPictures:
    """Pictures by their keys, and their pixels; the least recently used go first. A key has the
    digest, and the namespace whose requests share it."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_live_bytes = 0  # of all that some request has, or that are kept
        self._lock = threading.RLock()  # the end of a picture may come while it is held
        self._kept: OrderedDict[bytes, tuple[Picture, int]] = OrderedDict()

    @property
    def num_other_bytes(self) -> int:
        """Of the pictures that are not kept, and that requests have until they end."""
        return self._num_live_bytes - self._num_bytes

    def get(self, key: bytes) -> tuple[Picture, int] | None:
        """A picture that is kept. May be called by any thread."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, picture: Picture, num_pixels: int) -> None:
        """Keep a picture, if it is not kept already. May be called by any thread."""
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = picture, num_pixels
            self._num_bytes += _num_bytes(picture)
            self._num_live_bytes += _num_bytes(picture)
            weakref.finalize(picture, self._ended, _num_bytes(picture)).atexit = False
            while self._num_bytes > self._max_bytes:
                _, (dropped, _) = self._kept.popitem(last=False)
                self._num_bytes -= _num_bytes(dropped)

    def _ended(self, num_bytes: int) -> None:
        with self._lock:
            self._num_live_bytes -= num_bytes


def _num_bytes(picture: Picture) -> int:
    return sum(array.nbytes for array in picture.inputs.values()) + 8 * len(picture.token_ids)
