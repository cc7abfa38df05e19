"""Events of parsed answers."""

from __future__ import annotations

from minisgl.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    ReasoningText,
    joined,
)


def test_texts_that_follow_each_other_become_one_event() -> None:
    assert joined(
        [
            ReasoningText("a"),
            ReasoningText("b"),
            ContentText("c"),
            ContentText("d"),
            CallStart(0, "f"),
            CallArguments(0, "{"),
            CallArguments(0, "}"),
            CallEnd(0),
            CallStart(1, "f"),
            CallArguments(1, "{}"),
            CallEnd(1),
            ContentText("e"),
        ]
    ) == [
        ReasoningText("ab"),
        ContentText("cd"),
        CallStart(0, "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
        CallStart(1, "f"),
        CallArguments(1, "{}"),
        CallEnd(1),
        ContentText("e"),
    ]
    assert joined([]) == []
