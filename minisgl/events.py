"""What a parsed answer consists of, in the order in which the model writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Goes on with the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """Goes on with the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begins a tool call. Calls are counted from 0 within an answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Goes on with the arguments of a call: JSON text once they are complete."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Ends a call."""

    index: int
    is_object: bool = True  # its arguments; not where the answer was cut, or the model has slipped


Event: TypeAlias = ReasoningText | ContentText | CallStart | CallArguments | CallEnd


def has_broken_call(events: Iterable[Event]) -> bool:
    """Whether the arguments of a call that ends are no JSON object."""
    return any(isinstance(event, CallEnd) and not event.is_object for event in events)


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with texts that follow each other made one."""
    runs: list[tuple[Event, list[str]]] = []  # an event, and the texts of all of its kind
    for event in events:
        if isinstance(event, CallStart | CallEnd):
            runs.append((event, []))
        elif runs and _continues(runs[-1][0], event):
            runs[-1][1].append(event.text)
        else:
            runs.append((event, [event.text]))
    return [
        event
        if isinstance(event, CallStart | CallEnd) or len(texts) == 1
        else replace(event, text="".join(texts))
        for event, texts in runs
    ]


def _continues(before: Event, event: Event) -> bool:
    """Whether the text of `event` goes on with that of `before`."""
    if isinstance(before, CallArguments) and isinstance(event, CallArguments):
        return before.index == event.index
    return type(before) is type(event)
