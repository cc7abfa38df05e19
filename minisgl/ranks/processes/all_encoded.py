"""Which images all ranks have encoded: one has rows only where every rank has them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from minisgl.parts.images.host import Encoded


class AllEncoded:
    """Waits for the last rank to end the encoding of each image. Thread-safe."""

    def __init__(self, num_ranks: int, lost: Future[None]) -> None:
        """lost: done once the other ranks say nothing more."""
        self._num_ranks, self._lost = num_ranks, lost
        self._ended: dict[int, list[str]] = {}  # by image: what each rank said that has ended it
        self._own: set[int] = set()  # those that rank 0 has ended
        self._changed = threading.Condition()
        lost.add_done_callback(lambda _: self._notify())

    def ended(self, number: int, why: str) -> None:
        """Note that another rank has ended an image."""
        with self._changed:
            self._ended.setdefault(number, []).append(why)
            self._changed.notify_all()

    def agreed(self, own: Iterable[Encoded], *, wait: bool) -> tuple[Encoded, ...]:
        """The images that all ranks have ended since the last call. own: those that rank 0 has.
        wait: for all that rank 0 has ended so far, which the others are about to."""
        for number, why in own:
            self._own.add(number)
            self.ended(number, why)
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._lost.done() or not self._own - self._complete()
                )
            found = [
                (number, next(filter(None, self._ended.pop(number)), ""))
                for number in sorted(self._complete())
            ]
            self._own.difference_update(number for number, _ in found)
            return tuple(found)

    def _complete(self) -> set[int]:
        return {each for each, said in self._ended.items() if len(said) == self._num_ranks}

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
