"""Where a benchmark prints."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 160  # so that no table is cut where nobody looks at a screen


def make_console() -> Console:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
