"""The console of the benchmarks, and figures as flat tables for spreadsheets and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from minisgl.printable import printable

FILE_WIDTH = 160  # columns, so that no table is cut when the output is a file


class PrintableConsole(Console):
    """Escapes control characters: text from a server must not control the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console() -> Console:
    console = PrintableConsole(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested figures: ttft_s of p50 becomes ttft_s_p50."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{part}": number for part, number in flat(value).items()}
        else:
            found[name] = value
    return found
