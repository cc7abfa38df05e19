"""Separates thinking, `<think>…</think>`, from the answer where only the text of it is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.events import ContentText, Event, ReasoningText
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.formats import THINK

OPEN, CLOSE = THINK.open, THINK.close
NO_TOKEN = -1


@dataclass(slots=True)
class Split:
    thinking: str = ""
    text: str = ""


class ThinkingSplitter:
    """Splits an answer that arrives in pieces; what is a tag is as AnswerParser has it.

    Text that may become a tag is held back until that is decided, or until `flush`.
    """

    def __init__(self) -> None:
        self._parser = AnswerParser(None, THINK, marker_ids={})

    @property
    def inside(self) -> bool:
        """Whether a block has been opened and not closed."""
        return self._parser.is_reasoning

    def feed(self, piece: str) -> Split:
        return _split(self._parser.feed([(NO_TOKEN, piece)]))

    def flush(self) -> Split:
        """Return the text that was held back, at the end of the answer."""
        return _split(self._parser.finish(natural=True))


def split_whole(text: str) -> Split:
    """Split a complete answer."""
    splitter = ThinkingSplitter()
    split, rest = splitter.feed(text), splitter.flush()
    return Split(split.thinking + rest.thinking, split.text + rest.text)


def _split(events: Iterable[Event]) -> Split:
    split = Split()
    for event in events:
        match event:
            case ReasoningText(text):
                split.thinking += text
            case ContentText(text):
                split.text += text
    return split
