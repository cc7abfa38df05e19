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
    least, most = limits(schema, "Length")
    lengths = f"/(.|\\n){{{least},{'' if most is None else most}}}/"
    has_length = least > 0 or most is not None
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return lengths if has_length else ANY_TEXT
    found = " | ".join(_found(pattern))
    return f"({found}) & {lengths}" if has_length else found


def limits(schema: Mapping[str, Any], what: str) -> tuple[int, int | None]:
    """The least and the most of `what`, which may be written as 2.0; None: any number."""
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    number = int | float
    return (
        int(least) if isinstance(least, number) else 0,
        int(most) if isinstance(most, number) else None,
    )


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
