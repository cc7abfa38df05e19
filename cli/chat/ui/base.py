"""The interface between the chat and the place where it talks: a terminal, or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class ChatUI(Protocol):
    """What the REPL needs of the place where it talks."""

    interactive: bool
    keys: Mapping[str, str]  # that mean something here, and what they do

    async def read(self, *, interrupted: bool) -> str | None:
        """The next line that the person enters; None when they have left.

        `interrupted`: they have just pressed Ctrl-C, and once more means to leave.
        """
        ...

    def talking(self) -> AbstractContextManager[None]:
        """Open for as long as lines are read and answered."""
        ...

    def answering(self) -> AbstractContextManager[None]:
        """`think` and `write` are for the time while this is open."""
        ...

    def think(self, text: str) -> None:
        """A piece of what the model thinks before it answers, at once."""
        ...

    def write(self, text: str) -> None:
        """A piece of an answer, at once."""
        ...

    def say(self, line: str) -> None:
        """A word of the REPL itself that the person must see."""
        ...

    def note(self, line: str) -> None:
        """One that they may overlook."""
        ...

    def busy(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Shows what takes time while the context is open; calling its target shows more of it."""
        ...
