"""Text that people read in a terminal, also text of others."""

from __future__ import annotations

import re

# Control characters but newline and tab, surrogates, and what turns the direction of text around.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]+")


def printable(text: str) -> str:
    """Without what drives a terminal, makes text look like other text, or cannot be written."""
    return _UNPRINTABLE.sub("", text)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
