"""The chat's user interface for a person: line editing by prompt_toolkit, Markdown by rich."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.theme import Theme

from minisgl.printable import printable

from .prompt import make_session, readable
from .view import MarkdownView, PlainView

# Readable on light and dark: the colours are the terminal's, and there is no background.
THEME = Theme({f"markdown.{name}": "cyan" for name in ("code", "code_block", "item.number")})


class Terminal:
    interactive = True
    keys: Mapping[str, str] = {
        "Ctrl-C": "stops an answer, and once more leaves",
        "Ctrl-J": 'begins a new line; so does Enter between """ and """',
        "Ctrl-O": "shows what the model thought before its last answer",
    }

    def __init__(self, commands: Mapping[str, str], *, show_thinking: bool, plain: bool) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, theme=THEME)
        self.words: dict[str, Sequence[str]] = {}
        self._session = make_session(commands, self.words, self._show_thoughts)
        self._show_thinking = show_thinking
        self._plain = plain or self._console.is_dumb_terminal
        self._thoughts = ""  # of the last answer
        self._view: PlainView | MarkdownView | None = None

    async def read(self, *, interrupted: bool) -> str | None:
        """Reads a line. Ctrl-C drops the typed text and shows how to leave; a second one leaves."""
        self._console.print()
        while True:
            try:
                return readable(await self._session.prompt_async("> "))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if interrupted and not self._session.default_buffer.text:
                    return None
                interrupted = True
                self.note("Ctrl-C once more or Ctrl-D leaves.")

    def talking(self) -> AbstractContextManager[None]:
        return _silent_keys()

    @contextmanager
    def answering(self) -> Iterator[None]:
        kind = PlainView if self._plain else MarkdownView
        self._view = kind(self._console, show_thinking=self._show_thinking)
        try:
            yield
        finally:
            self._view.close()
            self._thoughts = self._view.thoughts.strip()

    def think(self, text: str) -> None:
        assert self._view is not None
        self._view.think(printable(text))

    def write(self, text: str) -> None:
        assert self._view is not None
        self._view.write(printable(text))

    def code(self, text: str, language: str) -> None:
        assert self._view is not None
        self._view.code(printable(text), language)

    def say(self, line: str) -> None:
        self._console.print(printable(line))

    def note(self, line: str) -> None:
        self._console.print(printable(line), style="dim")

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[str], None]]:
        with self._console.status(what) as status:
            yield status.update

    def _show_thoughts(self) -> None:
        self.note(self._thoughts or "There was no thinking before the last answer.")


@contextmanager
def _silent_keys() -> Iterator[None]:
    """Disables the echo of keys pressed while there is no prompt, which would disturb the drawing.
    The next prompt receives them, Enter as Enter."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):
        yield
        return
    silent = termios.tcgetattr(sys.stdin)
    silent[0] &= ~termios.ICRNL  # so that the prompt can tell Enter from Ctrl-J
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
