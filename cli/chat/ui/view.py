"""Shows one answer on a terminal while it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from .live import LiveLines, ScreenLine, render
from .markdown import MAX_CODE_SIZE, MAX_SIZE, Block, BlockMarkdown, Blocks, size

FRAME_S = 1 / 30
DRAWING_FRACTION = 0.2  # of the time, at most
NUM_THOUGHT_LINES = 3  # shown of thinking that will be folded
MAX_THOUGHT_CHARS = 2000  # looked at for them
BLANK = ScreenLine("", "")
FENCE = "```"


class PlainView:
    """Prints text as it arrives: for dumb terminals, and for --plain.

    Text for this view and for `MarkdownView` must have no control characters. `close` is called
    once, when the answer is complete.
    """

    def __init__(self, console: Console, *, show_thinking: bool) -> None:
        self._console = console
        self._show_thinking = show_thinking
        self._at_line_start = True
        self._is_thinking = self._is_code = False
        self.thoughts = ""

    def think(self, text: str) -> None:
        if not self._is_thinking:
            self._is_thinking = True
            self._put("Thinking…\n")
        self.thoughts += text
        if self._show_thinking:
            self._put(text)

    def write(self, text: str) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._put("\n\n" if self._show_thinking else "\n")
        if self._is_code:
            self._is_code = False
            self._put("\n" * (not self._at_line_start))
        self._put(text)

    def code(self, text: str, language: str) -> None:
        if not self._is_code:
            self.write("\n" * (not self._at_line_start))
            self._is_code = True
        self._put(text)

    def close(self) -> None:
        if not self._at_line_start:
            self._put("\n")

    def _put(self, text: str) -> None:
        self._at_line_start = text.endswith("\n")
        self._console.file.write(text)
        self._console.file.flush()


class MarkdownView:
    """Prints finished blocks once; only the unfinished rest is redrawn."""

    def __init__(self, console: Console, *, show_thinking: bool) -> None:
        self._console = console
        self._show_thinking = show_thinking
        self._live = LiveLines(console)
        self._pacer = Pacer(self._draw)
        self._blocks = Blocks()
        self._unread = ""  # of the answer, since it was drawn
        self._plain: PlainView | None = None  # for the rest of an answer that is too much
        self._before: Block | None = None  # the last finished one
        self._is_first = True  # nothing has been printed for good
        self._is_code = False  # what comes, by `code`
        self._thinking_since: float | None = None  # None: not now
        self._unread_thoughts = ""  # since lines of them were printed for good
        self.thoughts = ""

    def think(self, text: str) -> None:
        if self._thinking_since is None:
            self._thinking_since = time.perf_counter()
        self.thoughts += text
        self._unread_thoughts += text
        if self._plain is None:
            self._pacer.ask()

    def write(self, text: str) -> None:
        if self._is_code:
            self._is_code = False
            text = f"\n{FENCE}\n\n{text}"
        self._write(text)

    def code(self, text: str, language: str) -> None:
        if not self._is_code:
            self._is_code = True
            text = f"\n\n{FENCE}{language}\n{text}"
        self._write(text)

    def _write(self, text: str) -> None:
        self._end_thinking()
        if self._plain is not None:
            self._plain.write(text)
            return
        if size(self._unread) + size(text) > MAX_SIZE:
            self._become_plain(text)
            return
        self._unread += text
        self._pacer.ask()

    def close(self) -> None:
        self._pacer.stop()
        if self._plain is not None:
            self._plain.close()
            return
        self._end_thinking()
        finished = [*self._feed(), *self._blocks.last()]
        lines = self._lines(finished, finished=True)
        self._live.draw(lines, num_final=len(lines))

    def _draw(self) -> None:
        if self._thinking_since is not None:
            self._draw_thoughts()
            return
        final = self._lines(self._feed(), finished=True)
        before, is_first = self._before, self._is_first
        # A second block would be a line whose kind is not known yet.
        unfinished = self._blocks.last()[:1]
        lines = self._lines(unfinished, finished=False)
        self._before, self._is_first = before, is_first
        self._live.draw(final + lines, num_final=len(final))
        is_code = any(block.is_code for block in unfinished)
        if self._blocks.size > (MAX_CODE_SIZE if is_code else MAX_SIZE):
            self._become_plain()

    def _become_plain(self, text: str = "") -> None:
        """Switches to plain text for the rest of an answer that is too large to draw in time."""
        self._pacer.stop()
        finished = self._feed()
        blocks, line = self._blocks.cut()
        lines = self._lines([*finished, *blocks], finished=True)
        self._live.draw(lines, num_final=len(lines))
        self._plain = PlainView(self._console, show_thinking=self._show_thinking)
        self._plain.write(line + text)

    def _feed(self) -> list[Block]:
        unread, self._unread = self._unread, ""
        return self._blocks.feed(unread)

    def _lines(self, blocks: list[Block], *, finished: bool) -> list[ScreenLine]:
        """Renders blocks with a blank line between them, unless they are items of one list."""
        lines: list[ScreenLine] = []
        for block in blocks:
            shown = _trimmed(render(self._console, BlockMarkdown(block, finished=finished)))
            # The columns of a table move until it ends: none of it may leave the screen before.
            if block.is_table and not finished:
                shown = shown[-self._live.room + 1 :]
            if shown:
                if not self._is_first and not block.follows_in_list(self._before):
                    lines.append(BLANK)
                lines += shown
                self._before, self._is_first = block, False
        return lines

    def _draw_thoughts(self) -> None:
        if self._show_thinking:
            whole, newline, rest = self._unread_thoughts.rpartition("\n")
            self._unread_thoughts = rest
            final = self._dim(whole) if newline else []
            self._live.draw(final + self._dim(rest), num_final=len(final))
        else:
            end = self._dim(self.thoughts[-MAX_THOUGHT_CHARS:].strip(), indent=2)
            self._live.draw(self._dim("Thinking…") + end[-NUM_THOUGHT_LINES:])

    def _end_thinking(self) -> None:
        if self._thinking_since is None or self._plain is not None:
            return
        seconds = time.perf_counter() - self._thinking_since
        self._thinking_since = None
        if self._show_thinking:
            lines = self._dim(self._unread_thoughts.rstrip())
        else:
            lines = self._dim(f"Thought for {seconds:.1f} s (Ctrl-O at the prompt shows it)")
        self._live.draw(lines, num_final=len(lines))
        self._is_first = False

    def _dim(self, text: str, indent: int = 0) -> list[ScreenLine]:
        content = Text(text, style="dim", overflow="fold")
        return render(self._console, Padding(content, (0, 0, 0, indent)))


class Pacer:
    """Calls `draw` soon after a request, at most once per frame."""

    def __init__(self, draw: Callable[[], None]) -> None:
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0  # in the loop's time

    def ask(self) -> None:
        if self._timer is not None:
            return
        delay = self._next_s - self._loop.time()
        if delay <= 0:
            self._run()
        else:
            self._timer = self._loop.call_later(delay, self._run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._timer = None
        began = self._loop.time()
        self._draw()
        ended = self._loop.time()
        # A long block takes long to draw, which must not slow down the engine in the same loop.
        self._next_s = ended + max(FRAME_S, (ended - began) / DRAWING_FRACTION)


def _trimmed(lines: list[ScreenLine]) -> list[ScreenLine]:
    """`lines` without blank ones at either end."""
    filled = [index for index, line in enumerate(lines) if line.plain]
    return lines[filled[0] : filled[-1] + 1] if filled else []
