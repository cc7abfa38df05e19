"""Quotation marks around what a person types: three around several lines, one around a word."""

from __future__ import annotations

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


def is_open(text: str) -> bool:
    """Whether a text, or what follows a command, begins with three and has not come to the end."""
    text = text.strip()
    if text.startswith("/"):
        text = text.partition(" ")[2].lstrip()
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed
