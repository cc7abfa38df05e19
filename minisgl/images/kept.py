"""Images that were processed lately: the next turn of a conversation has them again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from minisgl.images.picture import Picture

KEPT_BYTES = 512 << 20


class KeptPictures:
    """Pictures by their digests, and their pixels; the least recently used go first."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Picture, int]] = OrderedDict()

    def get(self, digest: bytes) -> tuple[Picture, int] | None:
        """A picture that is kept. May be called by any thread."""
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def put(self, picture: Picture, num_pixels: int) -> None:
        """Keep a picture, if it is not kept already. May be called by any thread."""
        with self._lock:
            if picture.digest in self._kept:
                return
            self._kept[picture.digest] = picture, num_pixels
            self._num_bytes += _num_bytes(picture)
            while self._num_bytes > self._max_bytes:
                _, (dropped, _) = self._kept.popitem(last=False)
                self._num_bytes -= _num_bytes(dropped)


def _num_bytes(picture: Picture) -> int:
    return sum(array.nbytes for array in picture.inputs.values()) + 8 * len(picture.token_ids)
