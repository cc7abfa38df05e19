"""Parses what a person types (commands and quotes), and formats what the chat prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.errors import nearest

QUOTES = '"""'


def unquoted(text: str) -> str:
    """The text between triple quotation marks, or the text itself."""
    text = text.strip()
    if text.startswith(QUOTES) and text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def unquoted_argument(text: str) -> str:
    """The argument of a command, which may also have single quotation marks, as in a shell."""
    inside = unquoted(text)
    is_pair = inside == text and len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_pair and '"' not in text[1:-1] else inside


def as_command(text: str) -> tuple[str, str] | None:
    """Splits a command into its name and its argument; None for a question, also about /a/path."""
    name, rest = [*text.split(maxsplit=1), "", ""][:2]
    return (name, rest.strip()) if name.startswith("/") and "/" not in name[1:] else None


def is_open(text: str) -> bool:
    """Whether a text, or a command's argument, has opening triple quotes and no closing ones."""
    command = as_command(text)
    text = text.strip() if command is None else command[1]
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed


def shortened(text: str, num_chars: int) -> str:
    """The text on one line of at most `num_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= num_chars else f"{line[: num_chars - 1]}…"


def num_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    shorter = min(len(left), len(right))
    return next((index for index, (one, other) in pairs if one != other), shorter)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines with aligned columns. An empty row gives an empty line."""
    columns = max(map(len, rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def did_you_mean(name: str, names: Sequence[str], familiar: Mapping[str, str] | None = None) -> str:
    """A sentence with the nearest name and a trailing blank, or an empty text; see `nearest`."""
    near = nearest(name, names, familiar)
    return f"Did you mean {near}? " if near else ""
