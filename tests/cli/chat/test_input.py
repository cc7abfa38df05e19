"""What a person types: completion, quotes, commands, and the history file."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from minisgl_cli.chat.parameters import NAMES
from minisgl_cli.chat.repl import COMMANDS
from minisgl_cli.chat.text_format import as_command, is_open, unquoted, unquoted_argument
from minisgl_cli.chat.ui.prompt import ARGUMENTS, CommandCompleter, PrivateHistory, history_file


def completions(typed: str) -> list[str]:
    completer = CommandCompleter(COMMANDS, {"/lora": ["sql-2", "poems", "off"]})
    found = completer.get_completions(Document(typed), CompleteEvent())
    return [completion.text for completion in found]


def test_commands_are_completed_and_nothing_else() -> None:
    assert completions("/") == list(COMMANDS)
    assert completions("/re") == ["/retry", "/reset"]
    assert completions("/reset") == completions("re") == completions("say /re") == []
    assert completions("/reset ") == completions("/nothing t") == []


def test_arguments_of_commands_are_completed(tmp_path: Path) -> None:
    assert set(ARGUMENTS) <= set(COMMANDS)
    assert completions("/set  te") == ["temperature"]
    assert completions("/set ") == list(NAMES)
    assert completions("/set stop t") == []
    (tmp_path / "saved.json").touch()
    for name in ("/save", "/load"):
        assert completions(f"{name} {tmp_path}/sa") == ["ved.json"]
    for name in ("/json", "/tools"):
        assert completions(f"{name} {tmp_path}/sa") == ["ved.json"]
        assert "off" in completions(f"{name} o")
    assert completions("/lora ") == ["sql-2", "poems", "off"]
    assert completions("/lora sql-") == ["sql-2"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("a\nb ", "a\nb"), ('"""a\nb"""', "a\nb"), ('"""\n a\n"""', " a"), ('"""', '"""')],
)
def test_quotes_around_several_lines_are_not_part_of_them(typed: str, meant: str) -> None:
    assert unquoted(typed) == unquoted_argument(typed) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [('""', ""), ('"a b"', "a b"), ('"', '"'), ('"a" or "b"', '"a" or "b"'), ('a "b"', 'a "b"')],
)
def test_double_quotes_around_an_argument_are_not_part_of_it(typed: str, meant: str) -> None:
    assert unquoted_argument(typed) == meant
    assert unquoted(typed) == typed


@pytest.mark.parametrize(
    ("typed", "is_more_to_come"),
    [
        *(('"""', True), ('"""a\n', True), ('"""a\nb"""', False), ('a """', False)),
        *(('/system """', True), ('/system """a\nb"""', False), ('/system say """', False)),
        *(("/system", False), ("a", False), ('""""', True), ('/system ""', False)),
        *(('/system\t"""', True), (' /system """', True), ('/etc/hosts """', False)),
    ],
)
def test_enter_inserts_a_line_break_inside_quotes(typed: str, is_more_to_come: bool) -> None:
    assert is_open(typed) is is_more_to_come


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        *(("/set  top_k 5 ", ("/set", "top_k 5")), (" /help\t", ("/help", "")), ("/", ("/", ""))),
        ('/system """a\nb"""', ("/system", '"""a\nb"""')),
        *(
            (typed, None)
            for typed in ("", "a /help", "/etc/hosts is a file", "// a", '"""/help"""')
        ),
    ],
)
def test_only_a_slash_and_a_word_are_a_command(typed: str, command: tuple[str, str] | None) -> None:
    assert as_command(typed) == command


def test_history_outlives_the_session_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    for line in ("first", "second\nline", "half \ud800", "caf\udcc3\udca9"):
        PrivateHistory(file).store_string(line)
    strings = list(PrivateHistory(file).load_history_strings())
    assert strings == ["café", "half ?", "second\nline", "first"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_history_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "file" / "history", tmp_path):  # under a file; a folder
        history = PrivateHistory(file)
        history.append_string("a line")
        assert list(history.load_history_strings()) == []


def test_the_history_file_is_in_the_xdg_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert history_file() == Path("/elsewhere/minisgl/chat_history")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the standard says to ignore
    assert history_file() == Path.home() / ".local/state/minisgl/chat_history"
