"""Redraws the last lines on a terminal while they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

from minisgl.printable import printable

from ..text_format import num_common

# Synchronized output: terminals that support it show everything in between at once.
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"
# A line whose width the terminal sees otherwise than we do must not become two.
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"
ERASE_LINE, ERASE_BELOW = "\x1b[2K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """One row of the terminal: as plain text, and with colours."""

    plain: str
    coloured: str


def render(console: Console, content: RenderableType) -> list[ScreenLine]:
    """Renders `content` in the terminal's current width, without trailing blanks."""
    rows = []
    for row in console.render_lines(content, pad=False):
        # A model's text must not control the terminal.
        safe = [Segment(printable(text), style) for text, style, control in row if not control]
        while safe and not safe[-1].text.strip():
            safe.pop()
        if safe:
            safe[-1] = Segment(safe[-1].text.rstrip(), safe[-1].style)
        rows.append(safe)
    with console.capture() as captured:
        for row in rows:
            console.print(Segments([*row, Segment.line()]), soft_wrap=True)
    coloured = captured.get().split("\n")
    plain = ("".join(segment.text for segment in row) for row in rows)
    return [ScreenLine(*both) for both in zip(plain, coloured, strict=False)]


class LiveLines:
    """Redraws lines in place, and only those that have changed.

    Lines that do not fit on the screen scroll into the scrollback once and are not drawn again. The
    cursor stays after the last line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._gone: list[ScreenLine] = []
        self._shown: list[ScreenLine] = []  # below them, to be drawn again
        self._width = 0  # that both were drawn for

    @property
    def room(self) -> int:
        """Number of lines that can be redrawn."""
        return max(1, self._console.height - 1)

    def draw(self, lines: Sequence[ScreenLine], *, num_final: int = 0) -> None:
        """Draws all lines that are not final yet; the first `num_final` of them become final."""
        width = self._console.width
        num_gone = self._num_gone(lines, width)
        rest = lines[num_gone:]
        num_same = num_common(self._shown, rest) if width == self._width else 0
        parts = self._replacement(rest, num_same, width)
        num_gone += max(0, len(rest) - self.room)
        self._gone = list(lines[num_final:num_gone])
        self._shown = list(lines[max(num_final, num_gone) :])
        self._width = width
        if lines and not self._shown:
            parts.append("\n")
        if parts:
            self._console.file.write("".join([BEGIN, WRAP_OFF, *parts, WRAP_ON, END]))
            self._console.file.flush()

    def _num_gone(self, lines: Sequence[ScreenLine], width: int) -> int:
        """Number of `lines` that are above the screen."""
        if not self._gone:
            return 0
        if width == self._width:
            # Markup that ends late may have moved some of them: continue after the last one.
            last = self._gone[-1].plain
            places = (place for place, line in enumerate(lines, 1) if line.plain == last)
            num_gone = min(len(self._gone), len(lines))
            return min(places, key=lambda place: abs(place - num_gone), default=num_gone)
        # The old lines were wrapped at another width: count characters instead.
        num_chars = sum(map(_num_chars, self._gone))
        for index, line in enumerate(lines):
            if num_chars <= 0:
                return index
            num_chars -= _num_chars(line)
        return len(lines)

    def _replacement(self, lines: Sequence[ScreenLine], num_same: int, width: int) -> list[str]:
        """Output that turns the shown lines into `lines`; the first `num_same` are equal."""
        below = [line.coloured for line in lines[num_same:]]
        if num_same == len(self._shown):
            return ["\n" * bool(num_same), "\n".join(below)] if below else []
        # After a resize most terminals have wrapped what was there.
        old = self._shown[num_same:]
        num_rows = sum(max(1, -(-cell_len(line.plain) // width)) for line in old)
        parts = ["\r", _up(num_rows - 1), "\n".join(ERASE_LINE + text for text in below or [""])]
        column = cell_len(lines[-1].plain) + 1 if lines else 1
        if len(below) < num_rows:
            # From a line below, because tmux takes an erased screen for one worth remembering.
            num_up = 1 if below or not num_same else 2
            parts.append(f"\n{ERASE_BELOW}{_up(num_up)}\x1b[{column}G")
        return parts


def _up(num_rows: int) -> str:
    return f"\x1b[{num_rows}A" if num_rows else ""


def _num_chars(line: ScreenLine) -> int:
    return len(line.plain) - line.plain.count(" ")
