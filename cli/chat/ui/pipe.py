"""The chat's user interface for a program: plain lines in, plain answers out."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread

from minisgl.printable import printable
from minisgl.text.thinking import CLOSE, OPEN

from ..text_format import QUOTES, is_open


class Pipe:
    """Each line is a question, and so are several lines in triple quotes; only the answers are
    written to the output."""

    interactive = False
    keys: Mapping[str, str] = {}

    def __init__(self, *, show_thinking: bool = False) -> None:
        self.words: dict[str, Sequence[str]] = {}  # nothing is completed
        self._show_thinking = show_thinking
        self._is_thinking = False
        self._has_written = self._is_code = False
        self._at_line_start = True
        # Independent of the locale: a model may write any character.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")

    async def read(self, *, interrupted: bool) -> str | None:
        if interrupted:
            raise KeyboardInterrupt  # skip the remaining questions; the exit code reports it
        lines: list[str] = []
        while line := await _next_line():
            lines.append(line.decode("utf-8", "replace").rstrip("\r\n"))
            is_last = len(lines) > 1 and lines[-1].rstrip().endswith(QUOTES)
            if is_last or not is_open(lines[0]):
                break
        return "\n".join(lines) if lines else None

    def talking(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._has_written = self._is_code = False
        try:
            yield
            self._has_written = True  # an empty answer is an empty line
        finally:
            self._end_thinking()
            if self._has_written:
                self._put("\n")

    def think(self, text: str) -> None:
        if self._show_thinking and text:
            self._put(text if self._is_thinking else f"{OPEN}\n{text}")
            self._is_thinking = True

    def write(self, text: str) -> None:
        self._answer(text, is_code=False)

    def code(self, text: str, language: str) -> None:
        self._answer(text, is_code=True)

    def say(self, line: str) -> None:
        print(printable(line), file=sys.stderr)

    def note(self, line: str) -> None:
        """Drops the message: a program reads the output."""

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(lambda more: None)

    def _answer(self, text: str, *, is_code: bool) -> None:
        if text:
            self._end_thinking()
            # A line begins where text and code meet.
            if is_code is not self._is_code and self._has_written and not self._at_line_start:
                self._put("\n")
            self._is_code = is_code
            self._put(text)

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._put(f"\n{CLOSE}\n\n")

    def _put(self, text: str) -> None:
        self._has_written = True
        self._at_line_start = text.endswith("\n")
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


async def _next_line() -> bytes:
    """Reads one line including its newline; empty at EOF. Does not block the event loop.

    The input may never end, so Ctrl-C must not wait for anything here: neither for the thread, as
    it would for one of asyncio's, nor for the lock of a buffer.
    """
    line: Future[bytes] = Future()

    def read() -> None:
        line.set_running_or_notify_cancel()
        try:
            line.set_result(io.FileIO(sys.stdin.fileno(), closefd=False).readline())
        except Exception as error:
            line.set_exception(error)

    Thread(target=read, daemon=True).start()
    return await asyncio.wrap_future(line)
