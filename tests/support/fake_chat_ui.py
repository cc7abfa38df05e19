"""A chat UI that enters given lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minisgl_cli.chat.ui.pipe import Pipe


@dataclass
class FakeChatUI(Pipe):
    """A person who enters `lines` and leaves."""

    lines: list[str]
    written: str = ""
    thought: str = ""
    coded: str = ""  # in all answers
    said: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    interrupted: list[bool] = field(default_factory=list)  # before each line

    async def read(self, *, interrupted: bool) -> str | None:
        self.interrupted.append(interrupted)
        return self.lines.pop(0) if self.lines else None

    @contextmanager
    def answering(self) -> Iterator[None]:
        before = self.written
        try:
            yield
        finally:
            self.written += "\n" * (self.written != before)

    def think(self, text: str) -> None:
        self.thought += text

    def write(self, text: str) -> None:
        self.written += text

    def code(self, text: str, language: str) -> None:
        self.coded += text

    def say(self, line: str) -> None:
        self.said.append(line)

    def note(self, line: str) -> None:
        self.noted.append(line)
