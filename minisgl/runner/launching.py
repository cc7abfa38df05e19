"""Runs work in the order in which it is given: at once if that is quick, otherwise in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class LaunchThread:
    """The thread that queues steps on the device, which a caller may do itself while it is idle.

    One thread calls `run` and `submit`.
    """

    def __init__(self, enter_thread: Callable[[], None]) -> None:
        """enter_thread: called first in the thread."""
        self._thread = ThreadPoolExecutor(1, "minisgl-runner", enter_thread)
        self._last: Future[Any] | None = None  # given by `run`

    @property
    def is_idle(self) -> bool:
        """True if nothing is left of what `run` has given to the thread."""
        return self._last is None or self._last.done()

    def run(self, future: Future[T], work: Callable[[], T], *, quick: bool) -> None:
        """Fulfil `future` with `work`: here if it is quick, otherwise in the thread.

        Work is quick only while the thread is idle, because it would overtake the work there.
        """

        def fulfil() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        if quick:
            fulfil()
        else:
            self._last = self._thread.submit(fulfil)

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do this in the thread, after what it was given before. It counts as idle meanwhile."""
        self._thread.submit(work, *arguments)

    def close(self) -> None:
        """Wait for all work and end the thread."""
        self._thread.shutdown()
