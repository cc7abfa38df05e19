"""Lays out JSON while it arrives."""

from __future__ import annotations

INDENT = "  "
BLANKS = " \t\r\n"


class JsonIndenter:
    """Puts each member and element of a JSON text on a line of its own, indented.

    Takes the text in pieces of any size. Only blanks between the parts change. A text that begins
    neither an object nor an array stays as it is.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._began = False
        self._is_json = True
        self._in_string = self._escaped = False
        self._opened = False  # a bracket, after which the line is not decided yet

    def feed(self, text: str) -> str:
        """Returns the text in its new layout, as far as it is decided."""
        if not self._began:
            text = text.lstrip(BLANKS)
            if not text:
                return ""
            self._began = True
            self._is_json = text[0] in "{["
        return "".join(map(self._laid_out, text)) if self._is_json else text

    def _laid_out(self, char: str) -> str:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return char
        if char in BLANKS:
            return ""
        before = ""
        if char in "]}":
            self._depth -= 1
            before = "" if self._opened else self._line()
        elif self._opened:
            before = self._line()
        self._opened = char in "[{"
        self._depth += self._opened
        self._in_string = char == '"'
        after = self._line() if char == "," else " " if char == ":" else ""
        return before + char + after

    def _line(self) -> str:
        return "\n" + INDENT * self._depth
