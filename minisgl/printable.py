"""Text of others, as it may reach a terminal."""

from __future__ import annotations

import re

# Control characters but newline and tab, surrogates, and what turns the direction of text around.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]+")


def printable(text: str) -> str:
    """Without what drives a terminal, makes text look like other text, or cannot be written."""
    return _UNPRINTABLE.sub("", text)
