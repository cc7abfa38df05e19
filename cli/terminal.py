"""Where the REPL reads questions and writes answers: a terminal, or a pipe."""

from __future__ import annotations

import asyncio
import io
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from prompt_toolkit import PromptSession
from rich.console import Console


class Face(Protocol):
    """What the REPL needs of the place where it talks."""

    interactive: bool

    async def read(self) -> str | None:
        """The next line that the person enters; None when they have left."""
        ...

    def write(self, text: str) -> None:
        """A piece of an answer, at once."""
        ...

    def end_answer(self) -> None: ...

    def say(self, line: str) -> None:
        """A word of the REPL itself that the person must see."""
        ...

    def note(self, line: str) -> None:
        """One that they may overlook."""
        ...

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Shows what takes time while the context is open; calling its target shows more of it."""
        ...


def open_face() -> Face:
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()


class Terminal:
    """Line editing by prompt_toolkit, colours by rich."""

    interactive = True

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession()
        self._console = Console(highlight=False, soft_wrap=True, markup=False)

    async def read(self) -> str | None:
        """The first Ctrl-C drops what was typed and says how to leave, a second one leaves."""
        interrupted = False
        while True:
            try:
                return await self._session.prompt_async("> ")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted = True
                self.note("Ctrl-C once more or Ctrl-D leaves.")

    def write(self, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def end_answer(self) -> None:
        self.write("\n")

    def say(self, line: str) -> None:
        self._console.print(line)

    def note(self, line: str) -> None:
        self._console.print(line, style="dim")

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[str], None]]:
        with self._console.status(what) as status:
            yield status.update


class Pipe:
    """Each line is a question; nothing but the answers is written to the output."""

    interactive = False

    def __init__(self) -> None:
        # Whatever the locale says: a model writes every character there is.
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="replace")

    async def read(self) -> str | None:
        # In a thread, so that the engine's loop goes on while the other end of the pipe is silent.
        line = await asyncio.to_thread(sys.stdin.readline)
        return line.rstrip("\n") if line else None

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_answer(self) -> None:
        self.write("\n")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def note(self, line: str) -> None:
        """Not for a program at the other end."""

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda more: None)


def printable(text: str) -> str:
    """Without control characters: a model must not be able to drive the terminal."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or unicodedata.category(character) != "Cc"
    )
