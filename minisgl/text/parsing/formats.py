"""The ways in which models write tool calls and reasoning: one place for parsers and grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.text.parsing import (
    gemma_format,
    harmony,
    json_formats,
    named_formats,
    python_format,
    tagged_formats,
)
from minisgl.text.parsing.call_format import CallFormat, CallSpelling
from minisgl.text.parsing.calls import CallContext
from minisgl.text.parsing.harmony import AnswerSide, read_harmony
from minisgl.text.parsing.reader import Reading

# A grammar looks for the beginnings of so many tools' calls in a text; with more of them each
# token would take too long, and calls without a marker are the whole answer.
MAX_HELD_IN_TEXT = 64
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a block of reasoning, and what must follow the closing one."""

    open: str
    close: str
    after: str = ""
    title: str = ""  # what the model writes behind the opening one, which is markup


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How an answer is a chain of messages, whose headers tell reasoning, calls and text apart."""

    markers: tuple[str, ...]
    read: Callable[[CallContext, AnswerSide], Reading[None]]
    start: str  # begins each message, that of the generation prompt as well
    role: str  # follows it
    text: str  # the header of what the user sees
    body: str  # the marker at the end of each header
    efforts: tuple[str, ...]  # how much the model can think, from little to much
    tools: tuple[str, ...]  # that it knows by itself, and nothing here runs

    def nearest_effort(self, effort: str | None) -> str | None:
        """The effort of the model's that is nearest to one of EFFORTS."""
        if effort is None or effort in self.efforts:
            return effort
        wanted = EFFORTS.index(effort)
        return min(self.efforts, key=lambda known: abs(EFFORTS.index(known) - wanted))


THINK = ReasoningFormat("<think>", "</think>")
MAGISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
THOUGHT = ReasoningFormat("<|channel>", "<channel|>", title="thought\n")
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")


# A call ends the answer, so there is one at most.
HARMONY = CallFormat(
    "harmony",
    CallSpelling(
        head=f"{harmony.CHANNEL}{harmony.COMMENTARY} to={harmony.FUNCTIONS}",
        middle=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        tail="",
        between="",
        text=harmony.opening(harmony.FINAL),
        aside=(harmony.opening(harmony.COMMENTARY), harmony.NEXT),
        single=True,
    ),
    markers=harmony.MARKERS,
    openings=(),
    read=None,
)
HARMONY_MESSAGES = MessageFormat(
    harmony.MARKERS,
    read_harmony,
    start=harmony.START,
    role=harmony.ROLE,
    text=harmony.opening(harmony.FINAL),
    body=harmony.MESSAGE,
    efforts=("low", "medium", "high"),
    tools=("browser", "python"),
)
ANALYSIS = ReasoningFormat(
    harmony.opening(harmony.ANALYSIS),
    harmony.END,
    after=harmony.NEXT.removeprefix(harmony.END),
)

CALL_FORMATS = (
    *json_formats.FORMATS,
    *tagged_formats.FORMATS,
    *python_format.FORMATS,
    *named_formats.FORMATS,
    gemma_format.GEMMA4,
    HARMONY,
)
BY_NAME = {form.name: form for form in CALL_FORMATS}
REASONING_FORMATS = (THINK, MAGISTRAL, THOUGHT, SEED_THINK)
# What begins calls in a text.
OPENINGS = tuple(dict.fromkeys(text for form in CALL_FORMATS for text in form.openings))
