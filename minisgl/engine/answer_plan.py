"""What parses and limits the answers to one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.events import Event
from minisgl.grammar.compiler import Compiled
from minisgl.grammar.reasoning import ReasoningGate
from minisgl.parts.masks.host import Constraint
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.selection import AnswerFormat


def _no_parser() -> None:
    """The text is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What the answers of one request have in common. Each gets a parser and a matcher."""

    grammar: Compiled | None = None
    gate: ReasoningGate | None = None  # lets reasoning come before what the grammar applies to
    form: AnswerFormat | None = None  # in which they are parsed; None: they are not
    parser: Callable[[], AnswerParser | None] = _no_parser  # a new one for each answer
    begun: type[Event] | None = None  # what of a message the prompt has begun

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        return () if self.grammar is None else self.grammar.ignored_keywords

    def extras(self) -> tuple[Constraint, ...]:
        """What one answer asks of parts: a matcher of its own."""
        return () if self.grammar is None else (Constraint(self.grammar.matcher(self.gate)),)


FREE = AnswerPlan()
