"""The console of the benchmarks, and figures as flat tables for spreadsheets and comparisons."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
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


def write_csv(path: Path, rows: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
    """Write a row for each measurement: its label and its Figures. Empty cells are unknown."""
    lines = [dict(label) | flat(asdict(figures)) for label, figures in rows]
    columns = dict.fromkeys(name for line in lines for name, value in line.items())
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns], restval="")
        writer.writeheader()
        writer.writerows(lines)
