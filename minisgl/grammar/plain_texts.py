"""What a JSON schema asks of strings, for formats that write them as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from minisgl.grammar.source import inline_regex

ANY_TEXT = r"/(.|\n)*/"
ANYTHING, NOTHING = "(?s:.*)", r"[^\s\S]"
# Escapes and classes of characters are passed over: an anchor in them is a character.
ANCHOR = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[\^$]", re.S)


def text_of(schema: Mapping[str, Any]) -> str:
    """A Lark expression, of a terminal, for the texts of a string: its pattern and its lengths."""
    least, most = (_length(schema.get(f"{bound}Length")) for bound in ("min", "max"))
    lengths = f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/"
    has_length = least or most is not None
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return lengths if has_length else ANY_TEXT
    found = " | ".join(_found(pattern))
    return f"({found}) & {lengths}" if has_length else found


def _length(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _found(pattern: str) -> Iterator[str]:
    """Regexes of the texts in which `pattern` is found.

    llguidance matches whole texts, where anchors are empty. So either what is found begins the
    text, or no `^` can match in it; and so for its end.
    """
    anchors = {found[0] for found in ANCHOR.finditer(pattern)}
    for begins in (True, False) if "^" in anchors else (False,):
        for ends in (True, False) if "$" in anchors else (False,):
            void = {} if begins else {"^": NOTHING}
            void |= {} if ends else {"$": NOTHING}
            regex = _replaced(pattern, void)
            before, after = "" if begins else ANYTHING, "" if ends else ANYTHING
            yield inline_regex(f"{before}(?:{regex}){after}")


def _replaced(pattern: str, anchors: Mapping[str, str]) -> str:
    return ANCHOR.sub(lambda found: anchors.get(found[0], found[0]), pattern)
