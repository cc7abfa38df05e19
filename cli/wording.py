"""Small forms of what the chat says to people."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(text: str, num_chars: int) -> str:
    """On one line."""
    line = " ".join(text.split())
    return line if len(line) <= num_chars else f"{line[: num_chars - 1]}…"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with its columns under those of the others. An empty row is a gap."""
    columns = max(map(len, rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A sentence with a blank behind it, or nothing."""
    near = get_close_matches(name, names, n=1)
    return f"Did you mean {near[0]}? " if near else ""
