"""The commands of the REPL. A new one is a function here and a row of the table below."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from .conversation import Conversation
from .face import Face
from .model import ChatModel


@dataclass(slots=True)
class Session:
    """What commands read and change."""

    model: ChatModel
    face: Face
    conversation: Conversation
    sampling: dict[str, Any] = field(default_factory=dict)  # where the person has chosen
    num_unanswered: int = 0


class Then(enum.Enum):
    """What the loop does after a command."""

    READ = "read the next line"
    ANSWER = "let the model answer the conversation as it stands"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Command:
    does: str
    run: Callable[[Session, str], Then]  # with what stands behind the name
    takes: str = ""  # a word for that; "": nothing may stand there


def run_command(session: Session, line: str) -> Then:
    """`line` begins with a slash."""
    name, _, rest = line.strip().partition(" ")
    command = TABLE.get(name)
    if command is None:
        near = get_close_matches(name, TABLE, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        session.face.say(f"There is no command {name}. {hint}/help lists the commands.")
        return Then.READ
    if rest and not command.takes:
        session.face.say(f"{name} stands alone.")
        return Then.READ
    return command.run(session, rest.strip())


def _help(session: Session, rest: str) -> Then:
    for name, command in TABLE.items():
        session.face.say(f"{f'{name} {command.takes}':11}{command.does}")
    for keys, does in session.face.keys.items():
        session.face.say(f"{keys:11}{does}")
    return Then.READ


def _reset(session: Session, rest: str) -> Then:
    session.conversation.reset()
    session.face.note("A new conversation.")
    return Then.READ


def _exit(session: Session, rest: str) -> Then:
    return Then.LEAVE


TABLE = {
    "/help": Command("lists the commands", _help),
    "/reset": Command("forgets the conversation and starts a new one", _reset),
    "/exit": Command("leaves, as Ctrl-D does", _exit),
}
