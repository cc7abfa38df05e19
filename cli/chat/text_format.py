"""The form of texts: of what a person types (commands and quotes), and of what the chat prints."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

QUOTES = '"""'


def unquoted(text: str) -> str:
    """What stands between three quotation marks, if the text does."""
    text = text.strip()
    if text.startswith(QUOTES) and text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def unquoted_argument(text: str) -> str:
    """Of a command, where people also write one pair, as in a shell."""
    inside = unquoted(text)
    is_pair = inside == text and len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_pair and '"' not in text[1:-1] else inside


def as_command(text: str) -> tuple[str, str] | None:
    """Its name and what stands behind it; None for a question, be it one about /a/path."""
    name, rest = [*text.split(maxsplit=1), "", ""][:2]
    return (name, rest.strip()) if name.startswith("/") and "/" not in name[1:] else None


def is_open(text: str) -> bool:
    """Whether a text, or what follows a command, begins with three and has not come to the end."""
    command = as_command(text)
    text = text.strip() if command is None else command[1]
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed


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
