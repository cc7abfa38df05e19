"""The input line of the chat: history, several lines, completion of commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
    merge_completers,
)
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ..parameters import NAMES
from ..text_format import is_open

FILE_OR_OFF = merge_completers([WordCompleter(["off"]), PathCompleter(expanduser=True)])
# Completion of a command's argument.
ARGUMENTS: Mapping[str, Completer] = {
    "/set": WordCompleter(NAMES, sentence=True),
    "/save": PathCompleter(expanduser=True),
    "/load": PathCompleter(expanduser=True),
    "/json": FILE_OR_OFF,
    "/tools": FILE_OR_OFF,
}


def make_session(
    commands: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    show_thoughts: Callable[[], None],
) -> PromptSession[str]:
    """words: that complete the argument of a command; they may change."""
    return PromptSession(
        multiline=True,
        key_bindings=_key_bindings(show_thoughts),
        completer=CommandCompleter(commands, words),
        complete_while_typing=True,
        history=PrivateHistory(history_file()),
        prompt_continuation="  ",
        reserve_space_for_menu=min(4, len(commands) + 1),
    )


def readable(typed: str) -> str:
    """What was typed, as Unicode. Where the terminal's encoding lacks a character, Python keeps its
    bytes as lone surrogates; they are taken as UTF-8."""
    try:
        return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return typed.encode("utf-8", "replace").decode()


def _key_bindings(show_thoughts: Callable[[], None]) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-o")
    def _thoughts(event: KeyPressEvent) -> None:
        run_in_terminal(show_thoughts)

    return keys


class CommandCompleter(Completer):
    def __init__(self, commands: Mapping[str, str], words: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands
        self._words = words

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        typed = document.text_before_cursor
        command, space, argument = typed.partition(" ")
        completer = ARGUMENTS.get(command)
        if command in self._words:
            completer = WordCompleter([*self._words[command]], sentence=True)
        if space and completer is not None:
            rest = Document(argument.lstrip())
            yield from completer.get_completions(rest, complete_event)
        elif typed.startswith("/"):
            for name, does in self._commands.items():
                if name.startswith(typed) and name != typed:
                    yield Completion(name, start_position=-len(typed), display_meta=does)


def history_file() -> Path:
    """The path in the user's state folder (XDG_STATE_HOME)."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    state = Path(folder) if os.path.isabs(folder) else Path("~/.local/state").expanduser()
    return state / "minisgl" / "chat_history"


class PrivateHistory(FileHistory):
    """A history file readable only by its owner. Without one, history lasts for the session."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600))
            super().store_string(readable(string))
        except OSError:  # a full disk, a read-only home
            pass
