"""The face of the chat for a program: plain lines in, plain answers out."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .thinking import CLOSE, OPEN


class Pipe:
    """Each line is a question; nothing but the answers is written to the output."""

    interactive = False
    keys: Mapping[str, str] = {}

    def __init__(self, *, show_thinking: bool = False) -> None:
        self._show_thinking = show_thinking
        self._is_thinking = False
        self._has_written = False
        # Whatever the locale says: a model writes every character there is.
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="replace")

    async def read(self, *, interrupted: bool) -> str | None:
        if interrupted:
            return None
        # In a thread, so that the engine's loop goes on while the other end of the pipe is silent.
        line = await asyncio.to_thread(sys.stdin.readline)
        return line.rstrip("\n") if line else None

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._has_written = False
        try:
            yield
            self._has_written = True  # an answer without a word is an empty line
        finally:
            self._end_thinking()
            if self._has_written:
                self._put("\n")

    def think(self, text: str) -> None:
        if self._show_thinking and text:
            self._put(text if self._is_thinking else f"{OPEN}\n{text}")
            self._is_thinking = True

    def write(self, text: str) -> None:
        if text:
            self._end_thinking()
            self._put(text)

    def say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def note(self, line: str) -> None:
        """Not for a program at the other end."""

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda more: None)

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._put(f"\n{CLOSE}\n\n")

    def _put(self, text: str) -> None:
        self._has_written = True
        sys.stdout.write(text)
        sys.stdout.flush()
