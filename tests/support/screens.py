"""A terminal in memory that interprets what the chat writes, and waiting in real ones."""

from __future__ import annotations

import re

import pexpect
from rich.cells import cell_len

TOKEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Screen:
    """Takes what is written to a terminal. Raises ValueError for a sequence that it does not know.

    The terminal turns a line feed into a new line, and `scrollback` has what went up.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.scrollback: list[str] = []
        self._rows: list[list[str]] = [[] for _ in range(height)]
        self._row = self._column = 0
        self._wraps = True

    @property
    def lines(self) -> list[str]:
        """Everything that a person finds, scrolling up."""
        rows = ["".join(row).rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return self.scrollback + rows

    def write(self, text: str) -> None:
        position = 0
        while position < len(text):
            token = TOKEN.match(text, position)
            if token is None:
                raise ValueError(f"unknown sequence {text[position : position + 10]!r}")
            position = token.end()
            match token[0]:
                case "\r":
                    self._column = 0
                case "\n":
                    self._new_line()
                case one if len(one) == 1:
                    self._put(one)
                case _:
                    self._obey(token[1], int(token[2].split(";")[0] or 0), token[3])

    def _obey(self, private: str, number: int, final: str) -> None:
        match private, final:
            case "", "m":
                pass
            case "?", "h" | "l" if number == 2026:
                pass
            case "?", "h" | "l" if number == 7:
                self._wraps = final == "h"
            case "", "A":
                self._row = max(0, self._row - max(1, number))
            case "", "G":
                self._column = min(self.width, number) - 1
            case "", "K" if number == 2:
                self._rows[self._row] = []
            case "", "J" if number == 0:
                del self._rows[self._row][self._column :]
                self._rows[self._row + 1 :] = [[] for _ in self._rows[self._row + 1 :]]
            case _:
                raise ValueError(f"unknown sequence {private}{number}{final}")

    def _put(self, character: str) -> None:
        size = cell_len(character)
        if self._column + size > self.width:
            if self._wraps:
                self._new_line()
            else:
                self._column = self.width - size
        row = self._rows[self._row]
        row += [" "] * (self._column - len(row))
        row[self._column : self._column + size] = [character] + [""] * (size - 1)
        self._column += size

    def _new_line(self) -> None:
        self._column = 0
        self._row += 1
        if self._row == self.height:
            self.scrollback.append("".join(self._rows.pop(0)).rstrip())
            self._rows.append([])
            self._row -= 1


def at_prompt(terminal: pexpect.spawn) -> None:
    """Bracketed paste is on and the prompt is drawn: prompt_toolkit has the keys."""
    terminal.expect(r"\x1b\[\?2004h[\s\S]*?>")


def left(terminal: pexpect.spawn) -> int | None:
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus
