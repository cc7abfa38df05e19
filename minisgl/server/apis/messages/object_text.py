"""How much of a text that arrives in pieces may be the beginning of a JSON object."""

from __future__ import annotations

import re

BLANKS = re.compile(r"[ \t\r\n]*")
# The inside of a string, of which no escape is half of a character.
TEXT = re.compile(
    r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"
)
ESCAPE_BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u\w{0,3})?)?)?"
)
SCALAR = re.compile(
    r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)(?=[ \t\r\n,\]}])"
)
SCALAR_BEGUN = re.compile(r"[-+.0-9a-zA-Z]{1,1000}")
CLOSINGS = {"{": "}", "[": "]"}
MAX_DEPTH = 200  # that clients parse


def is_object(text: str) -> bool:
    """Whether a text is an object as clients parse it."""
    read = ObjectText()
    return read.passed(text) == text.rstrip(" \t\r\n") and read.is_whole


class ObjectText:
    """Passes on the pieces of a text as long as they go on with an object.

    Clients parse what has come so far at each piece, and give up where that begins nothing.
    """

    def __init__(self) -> None:
        self._held = ""  # the beginning of a number, a word or an escape
        self._closings: list[str] = []  # of what is open
        self._next = "{"  # what may come: these signs, and a value where there is a V
        self._in_string = self._is_key = False
        self.is_whole = False  # the object has ended

    def passed(self, piece: str) -> str:
        """As much of what has come as is certain. Nothing comes behind a mistake."""
        text, at = self._held + piece, 0
        while at < len(text) and self._next:
            end = self._text_end(text, at) if self._in_string else self._token_end(text, at)
            if end == at:
                break
            at = end
        self._held = text[at:] if self._next else ""
        return text[:at]

    def _text_end(self, text: str, at: int) -> int:
        """The end of what is certain of a string."""
        found = TEXT.match(text, at)
        assert found is not None
        at = found.end()
        if text.startswith('"', at):
            self._in_string = False
            self._follow(":" if self._is_key else None)
            return at + 1
        if at < len(text) and not ESCAPE_BEGUN.fullmatch(text, at):
            self._next = ""
        return at

    def _token_end(self, text: str, at: int) -> int:
        """The end of the next sign, number or word, with the blanks before it."""
        found = BLANKS.match(text, at)
        assert found is not None
        at = found.end()
        sign = text[at : at + 1]
        takes_value = "V" in self._next
        if sign == '"' and (takes_value or '"' in self._next):
            self._in_string, self._is_key = True, not takes_value
            return at + 1
        if sign in CLOSINGS and (takes_value or sign in self._next):
            if len(self._closings) == MAX_DEPTH:
                self._next = ""
                return at
            self._closings.append(CLOSINGS[sign])
            self._next = '"}' if sign == "{" else "V]"
            return at + 1
        if sign and sign in self._next and sign != "V":
            if sign in "]}":
                self._closings.pop()
                self._follow()
            elif sign == ":":
                self._next = "V"
            else:
                self._next = '"' if self._closings[-1] == "}" else "V"
            return at + 1
        if takes_value and (scalar := SCALAR.match(text, at)):
            self._follow()
            return scalar.end()
        if sign and not (takes_value and SCALAR_BEGUN.fullmatch(text, at)):
            self._next = ""
        return at

    def _follow(self, sign: str | None = None) -> None:
        """Go on behind a value, or behind a key with `sign`."""
        self.is_whole = not self._closings
        self._next = "" if self.is_whole else sign or f",{self._closings[-1]}"
