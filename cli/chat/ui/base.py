"""The interface between the chat and its input and output: a terminal, or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class ChatUI(Protocol):
    """The input and output that the REPL needs."""

    interactive: bool
    keys: Mapping[str, str]  # key bindings, and what they do
    words: dict[str, Sequence[str]]  # that complete the argument of a command

    async def read(self, *, interrupted: bool) -> str | None:
        """Reads the next line that the user enters; None at the end of the input.

        `interrupted`: the user has just pressed Ctrl-C; a second one leaves the chat.
        """
        ...

    def talking(self) -> AbstractContextManager[None]:
        """A context that stays open while the model loads, and lines are read and answered."""
        ...

    def answering(self) -> AbstractContextManager[None]:
        """A context for one answer: `think`, `write` and `code` are called inside."""
        ...

    def think(self, text: str) -> None:
        """Shows a piece of the model's thinking immediately."""
        ...

    def write(self, text: str) -> None:
        """Shows a piece of an answer immediately."""
        ...

    def code(self, text: str, language: str) -> None:
        """Shows a piece of an answer as code. Pieces that follow each other are one block."""
        ...

    def say(self, line: str) -> None:
        """Shows a message of the REPL that the user must see."""
        ...

    def note(self, line: str) -> None:
        """Shows a message that the user may overlook."""
        ...

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Shows `what` while the context is open; calling its target updates the text."""
        ...
