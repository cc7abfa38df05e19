"""How far loading is, for people: a bar on a terminal, elsewhere lines of the log."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5


class LoadProgress:
    """A context to load in; calling it says how far that is."""

    def __init__(self, console: Console | None = None) -> None:
        """console: standard error if not given."""
        console = console or Console(stderr=True)
        self._phase = ""
        self._next_line_s = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("Loading", total=None)

    def __call__(self, phase: str, fraction: float) -> None:
        """Show that `fraction` of the phase is done, 0 to 1. Any thread may call it, at any rate.

        Every phase reports 0 first, and some report nothing else, so 0 is not shown as a number.
        """
        label = phase[:1].upper() + phase[1:]
        if not self._bar.disable:
            if phase != self._phase:
                self._bar.remove_task(self._task)
                self._task = self._bar.add_task(label, total=None)
            if fraction:
                self._bar.update(self._task, total=1.0, completed=fraction)
        now = time.monotonic()
        if self._bar.disable and (phase != self._phase or now >= self._next_line_s):
            self._next_line_s = now + SECONDS_BETWEEN_LINES
            logger.info("%s%s", label, f": {100 * fraction:.0f} %" if fraction else "")
        self._phase = phase

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
