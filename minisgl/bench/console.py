"""Where a benchmark prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from minisgl.printable import printable

FILE_WIDTH = 160  # so that no table is cut where nobody looks at a screen


class PrintableConsole(Console):
    """What a server calls its model, or says of an error, must not drive the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console() -> Console:
    console = PrintableConsole(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
