"""Where a benchmark prints, and its figures as a flat table for spreadsheets and comparisons."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
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


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Every number of figures under one name: ttft_s of p50 is ttft_s_p50."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{part}": number for part, number in flat(value).items()}
        else:
            found[name] = value
    return found


def write_csv(path: Path, rows: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
    """A row for each measurement: what it was, and its Figures. Empty: not known."""
    lines = [dict(label) | flat(asdict(figures)) for label, figures in rows]
    columns = dict.fromkeys(name for line in lines for name, value in line.items())
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns], restval="")
        writer.writeheader()
        writer.writerows(lines)
