"""Reads what the deltas of an answer consist of, parsed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from minisgl.events import CallArguments, CallStart, ContentText, Event
from minisgl.grammar.tool_grammars import CUSTOM_ARGUMENT
from minisgl.request import OutputDelta
from minisgl.server.answers.plan import AnswerStyle


@dataclass(slots=True)
class Call:
    """A call of the answer, as far as it has come."""

    id: str
    name: str
    custom: bool
    arguments: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its arguments, as the model wrote them."""
        return "".join(self.arguments)

    @property
    def input(self) -> str:
        """The text that a custom tool is given; the model may have written something else."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, str])[CUSTOM_ARGUMENT]
        except (ValueError, KeyError, RecursionError):
            return self.text


class AnswerReader:
    """The events of one answer, and its calls so far."""

    def __init__(self, style: AnswerStyle | None) -> None:
        """style: None for an answer that is not parsed: its text is the content."""
        self.calls: list[Call] = []
        self._style = style
        self._started = False

    def read(self, delta: OutputDelta) -> Sequence[Event]:
        """The events of `delta`, in order, the first time with those of the echo."""
        style = self._style
        if style is None:
            return [ContentText(delta.text)] if delta.text else []
        started, self._started = self._started, True
        found = delta.events if started else [*style.echo, *delta.events]
        for each in found:
            match each:
                case CallStart(name=name):
                    self.calls.append(Call(style.call_id(), name, name in style.custom_names))
                    style.count_call()
                case CallArguments(index, text):
                    self.calls[index].arguments.append(text)
        return found
