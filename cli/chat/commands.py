"""The commands of the REPL. To add one, write a function and add it to GROUPS below."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any

from minisgl.errors import CallerError, MinisglError
from minisgl.images.local import address_of
from minisgl.printable import counted
from minisgl.text.thinking import split_whole

from . import answer_rules, conversation_file, parameters
from .conversation import Conversation
from .model import TEXT, AnswerRules, ChatModel
from .reply_record import ReplyRecord, stats_rows
from .text_format import aligned, did_you_mean, shortened, unquoted_argument
from .ui.base import ChatUI

NUM_QUOTED_CHARS = 50
OFF = "off"
EXAMPLES = {"/image": "photo.jpg"}
NUM_RECALLED_CHARS = 2000  # shown of a question and of an answer when a conversation is loaded


@dataclass(slots=True)
class Session:
    """The state that commands read and change."""

    model: ChatModel
    ui: ChatUI
    conversation: Conversation
    sampling: dict[str, Any] = field(default_factory=dict)  # set by the user
    rules: AnswerRules = TEXT
    answers: list[ReplyRecord] = field(default_factory=list)  # all of this conversation, for /stats
    num_failed: int = 0  # questions without a complete answer, and refused commands

    def refuse(self, reason: str) -> None:
        self.num_failed += 1
        self.ui.say(reason)


class NextAction(enum.Enum):
    """The next action of the loop after a command."""

    READ = "read the next line"
    ANSWER = "let the model answer the conversation"
    LEAVE = "leave"


class CommandError(CallerError):
    """A command is unknown or cannot be carried out."""


@dataclass(frozen=True, slots=True)
class Command:
    does: str
    # Gets the session and the text after the name. Returns None to read on. Raises MinisglError.
    run: Callable[[Session, str], NextAction | Awaitable[NextAction | None] | None]
    takes: str = ""  # the name of its argument; "": it takes none


async def run_command(session: Session, name: str, rest: str) -> NextAction:
    """Runs a command with the text after its name. Errors are shown to the user."""
    try:
        command = TABLE.get(name)
        if command is None:
            hint = did_you_mean(name, list(TABLE), FAMILIAR)
            raise CommandError(
                f"There is no command {shortened(name, NUM_QUOTED_CHARS)}. {hint}/help lists the "
                'commands; between """ and """ it is a question.'
            )
        if rest and not command.takes:
            raise CommandError(f"{name} takes no argument.")
        then = command.run(session, rest)
        return (await then if isawaitable(then) else then) or NextAction.READ
    except MinisglError as error:
        session.refuse(str(error))
        return NextAction.READ


# -- the conversation -----------------------------------------------------------------------------


def _retry(session: Session, rest: str) -> NextAction:
    if not session.conversation.ask_again():
        raise CommandError("There is no question to ask again.")
    return NextAction.ANSWER


def _undo(session: Session, rest: str) -> None:
    turn = session.conversation.undo()
    if turn is None:
        raise CommandError("There is no question to take back.")
    left = counted(len(session.conversation.turns), "turn")
    session.ui.note(f"Took back “{shortened(turn.question, NUM_QUOTED_CHARS)}”; {left} left.")


def _reset(session: Session, rest: str) -> None:
    session.conversation.reset()
    session.answers = []
    session.ui.note("A new conversation.")


def _save(session: Session, rest: str) -> None:
    path = _path("/save", rest)
    conversation_file.write(path, session.conversation, session.sampling, session.model.name)
    more = "" if session.conversation.question is None else " and a question without an answer"
    session.ui.note(f"{counted(len(session.conversation.turns), 'turn')}{more} saved to {path}.")


def _load(session: Session, rest: str) -> None:
    file = conversation_file.read(_path("/load", rest))
    system = session.conversation.system if file.system is None else file.system
    session.conversation = Conversation(system, file.turns, file.question, file.steps, file.images)
    session.answers = []
    if file.sampling is not None:
        _replace_sampling(session, file.sampling)
    model = session.model.name
    other = f", saved with {file.model}" if file.model and file.model != model else ""
    session.ui.note(f"{counted(len(file.turns), 'turn')} loaded{other}.")
    for turn in file.turns[-1:]:
        session.ui.note(f"> {_end(turn.question)}")
        session.ui.note(_end(split_whole(turn.answer).text))
    if file.question is not None:
        session.ui.note(f"> {_end(file.question)}")
        if not session.conversation.open_calls:
            session.ui.note("Not answered yet: /retry asks it.")


def _replace_sampling(session: Session, sampling: Mapping[str, Any]) -> None:
    """Applies the saved parameters that are valid and reports the others."""
    session.sampling = {}
    for name, value in sampling.items():
        try:
            session.sampling = _with(session, name, parameters.in_form(name, value))
        except MinisglError as error:
            session.ui.say(f"Left out of the file's parameters: {error}")


def _end(text: str) -> str:
    """The end of a long text."""
    return text if len(text) <= NUM_RECALLED_CHARS else f"…{text[-NUM_RECALLED_CHARS:]}"


def _path(name: str, rest: str) -> str:
    if not (typed := unquoted_argument(rest)):
        raise CommandError(
            f"{name} takes the name of a file, such as {name} {EXAMPLES.get(name, 'chat.json')}."
        )
    return conversation_file.path_of(typed)


# -- how it is answered ---------------------------------------------------------------------------


def _system(session: Session, rest: str) -> None:
    if rest:
        session.conversation.system = unquoted_argument(rest)
        now = "set" if session.conversation.system else "cleared"
        session.ui.note(f"The system prompt is {now}; the conversation stays.")
    else:
        session.ui.say(session.conversation.system or "There is no system prompt.")


def _set(session: Session, rest: str) -> None:
    said = re.fullmatch(r"([^\s=]+)(?:\s*=\s*|\s+)(.+)", rest, re.DOTALL)
    if said is None:
        raise CommandError("/set takes a name and a value, such as /set temperature 0.5.")
    name, defaults = said[1], session.model.sampling_defaults
    session.sampling = _with(session, name, parameters.parsed(name, said[2]))
    if name in session.sampling:
        now = shortened(parameters.shown(session.sampling[name]), NUM_QUOTED_CHARS)
    elif defaults is None:
        now = "the server's own"
    else:
        now = f"{parameters.shown(getattr(defaults, name))}, the model's own"
    unknown = name in session.sampling and name not in parameters.NAMES
    remark = "; minisgl does not know it and sends it as it is" if unknown else ""
    hint = did_you_mean(name, parameters.NAMES) if unknown else ""
    session.ui.note(f"{name} is {now}{remark}. {hint}".rstrip())


def _with(session: Session, name: str, value: Any) -> dict[str, Any]:
    """The chosen parameters with `name` set, or reset if `value` is None. Raises MinisglError."""
    parameters.check_name(name, may_be_other=session.model.sampling_defaults is None)
    changed = {**session.sampling, name: value}
    if value is None:
        del changed[name]
    session.model.check(changed)
    return changed


def _params(session: Session, rest: str) -> None:
    for line in parameters.listed(session.sampling, session.model.sampling_defaults):
        session.ui.say(line)


def _image(session: Session, rest: str) -> None:
    conversation, typed = session.conversation, unquoted_argument(rest)
    if typed == OFF:
        conversation.attached = []
        session.ui.note("No image goes with your next message.")
        return
    if session.model.sees is False:
        raise CommandError(f"{session.model.name} takes text only.")
    path = _path("/image", rest)
    conversation.attached.append(address_of(path))
    name, count = os.path.basename(path), counted(len(conversation.attached), "image")
    kilobytes = max(1, round(os.path.getsize(path) / 1000))
    session.ui.note(f"{name} ({kilobytes:,} kB): your next message has {count}; /image off: none.")


async def _json(session: Session, rest: str) -> None:
    if not rest:
        state = "are text" if session.rules.schema is None else "follow a schema"
        session.ui.say(f"Answers {state}; /json takes a file, a JSON schema, or off.")
    elif rest == OFF:
        session.rules = replace(session.rules, schema=None)
        session.ui.note("Answers are text.")
    else:
        if session.rules.tools:
            raise CommandError("Answers cannot follow a schema while tools are offered: /tools off")
        await _follow(session, AnswerRules(schema=answer_rules.read_schema(rest)))
        session.ui.note("Answers follow the schema; /json off ends it.")


async def _tools(session: Session, rest: str) -> None:
    if not rest:
        names = ", ".join(map(answer_rules.name_of, session.rules.tools)) or "none"
        session.ui.say(f"Tools: {names}; /tools takes a file, or off.")
    elif rest == OFF:
        session.rules = replace(session.rules, tools=())
        session.ui.note("No tools are offered.")
    else:
        if session.rules.schema is not None:
            raise CommandError("Tools cannot be offered while answers follow a schema: /json off")
        tools = answer_rules.read_tools(rest)
        await _follow(session, AnswerRules(tools=tools))
        names = ", ".join(map(answer_rules.name_of, tools))
        session.ui.note(f"Offered: {names}. When one is called, you type its result.")


def _lora(session: Session, rest: str) -> None:
    model, typed = session.model, unquoted_argument(rest)
    if not typed:
        taken = f"/lora takes {', '.join(model.adapters)} or {OFF}"
        session.ui.say(
            f"{model.name} answers; {taken if model.adapters else 'no adapter is there'}."
        )
        return
    if typed != OFF and typed not in model.adapters:
        hint = did_you_mean(typed, model.adapters)
        said = shortened(typed, NUM_QUOTED_CHARS)
        raise CommandError(f"There is no adapter {said}. {hint}/lora lists them.")
    model.adapter = "" if typed == OFF else typed
    session.ui.note(f"{model.name} answers from now on.")


async def _follow(session: Session, rules: AnswerRules) -> None:
    await session.model.check_rules(rules)
    session.rules = rules


# -- the rest -------------------------------------------------------------------------------------


def _stats(session: Session, rest: str) -> None:
    turns, limit = session.conversation.turns, session.model.max_seq_len
    rows = [("turns", f"{len(turns):,}")]
    if turns and (used := turns[-1].num_tokens) is not None:
        of_limit = f"{used:,} of {counted(limit, 'token')} ({used / limit:.0%})" if limit else ""
        rows.append(("context", of_limit or counted(used, "token")))
    for line in aligned([*rows, *stats_rows(session.answers), *session.model.status()]):
        session.ui.say(line)


def _help(session: Session, rest: str) -> None:
    rows: list[tuple[str, ...]] = []
    for group in GROUPS:
        rows += [(f"{name} {row.takes}".rstrip(), row.does) for name, row in group.items()]
        rows.append(())
    for line in aligned([*rows, *session.ui.keys.items()]):
        session.ui.say(line)


def _exit(session: Session, rest: str) -> NextAction:
    return NextAction.LEAVE


# As /help shows them.
GROUPS = (
    {
        "/retry": Command("drops the last answer and asks again", _retry),
        "/undo": Command("takes back the last question and its answer", _undo),
        "/reset": Command("forgets the conversation and starts a new one", _reset),
        "/save": Command("writes the conversation to a file", _save, "FILE"),
        "/load": Command("reads a conversation from a file", _load, "FILE"),
    },
    {
        "/image": Command("has an image go with your next message", _image, "FILE|off"),
        "/system": Command("shows or sets the system prompt", _system, "[TEXT]"),
        "/set": Command("sets a sampling parameter, such as temperature", _set, "NAME VALUE"),
        "/params": Command("lists the sampling parameters and their values", _params),
        "/json": Command("has answers follow a JSON schema", _json, "FILE|JSON|off"),
        "/tools": Command("offers tools, whose results you type", _tools, "FILE|off"),
        "/lora": Command("lists the adapters, or has one answer", _lora, "[NAME|off]"),
    },
    {
        "/stats": Command("shows the tokens, speed and cache use of the conversation", _stats),
        "/help": Command("lists the commands", _help),
        "/exit": Command("leaves, as Ctrl-D does", _exit),
    },
)
# Names in other programs.
FAMILIAR = {
    **dict.fromkeys(("/clear", "/new", "/restart"), "/reset"),
    **dict.fromkeys(("/bye", "/q", "/quit"), "/exit"),
    **dict.fromkeys(("/regen", "/regenerate", "/again"), "/retry"),
    **dict.fromkeys(("/?", "/h", "/commands"), "/help"),
    **dict.fromkeys(("/show", "/parameters", "/settings", "/get"), "/params"),
    **dict.fromkeys(("/temperature", "/parameter", "/param"), "/set"),
    "/read": "/load",
    "/model": "/lora",
    "/adapter": "/lora",
    "/info": "/stats",
}
TABLE = {name: command for group in GROUPS for name, command in group.items()}
