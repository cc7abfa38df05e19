"""Separates a model's thinking, `<think>…</think>`, from the answer after it."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"
MAX_HELD_CHARS = 1000


@dataclass(slots=True)
class Split:
    thinking: str = ""
    text: str = ""


class ThinkingSplitter:
    """Splits an answer that arrives in pieces. Only a tag at the very beginning counts.

    Text that may become a tag is held back until that is decided, or until `flush`.
    """

    def __init__(self) -> None:
        self._inside: bool | None = None  # None: only white space so far
        self._held = ""
        self._at_start = True  # of the thinking or the answer, where white space is dropped

    @property
    def inside(self) -> bool:
        """True while a thinking block is open."""
        return bool(self._inside)

    def feed(self, piece: str) -> Split:
        text, self._held = self._held + piece, ""
        if self._inside is None:
            begun = text.lstrip()
            # Still undecided; beyond MAX_HELD_CHARS it is an answer.
            if OPEN.startswith(begun) and len(text) <= MAX_HELD_CHARS:
                self._inside = True if begun == OPEN else None
                self._held = "" if self._inside else text
                return Split()
            self._inside = begun.startswith(OPEN)
            text = begun.removeprefix(OPEN) if self._inside else text
            self._at_start = self._inside
        if not self._inside:
            return Split(text=self._trim(text))
        thought, closed, rest = text.partition(CLOSE)
        if not closed:
            self._held = _tail(thought, CLOSE)
            return Split(thinking=self._trim(thought.removesuffix(self._held)))
        split = Split(thinking=self._trim(thought).rstrip())
        self._inside, self._at_start = False, True
        split.text = self._trim(rest)
        return split

    def flush(self) -> Split:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return Split(thinking=held) if self._inside else Split(text=held)

    def _trim(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text


def split_whole(text: str) -> Split:
    """Split a complete answer."""
    splitter = ThinkingSplitter()
    split, rest = splitter.feed(text), splitter.flush()
    return Split(split.thinking + rest.thinking, split.text + rest.text)


def _tail(text: str, tag: str) -> str:
    """The longest suffix of `text` that is a prefix of `tag`."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((text[-length:] for length in lengths if tag.startswith(text[-length:])), "")
