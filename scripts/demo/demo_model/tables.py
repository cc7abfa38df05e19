"""The options and commands of minisgl as the demo model learns them.

The model knows those of one release, stored in minisgl.json in its folder. Training and evaluation
read this snapshot, so that options can change without a new training.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from minisgl.models.hub import DEMO_FOLDER

SNAPSHOT = DEMO_FOLDER / "minisgl.json"


@cache
def snapshot() -> dict[str, Any]:
    """The content of minisgl.json: the `release`, its `tables` and the hash of the `evaluation`."""
    described: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return described


def tables() -> dict[str, Any]:
    """The tables of the snapshot: `options`, `commands`, and `chat_commands` of the REPL."""
    found: dict[str, Any] = snapshot()["tables"]
    return found


def todays_tables() -> dict[str, Any]:
    """The tables of the commands of this checkout, as JSON.

    An option of several commands is one entry. Its `defaults` and `helps` are lists of a text with
    the commands for which it holds; longer than one if commands differ.
    """
    from minisgl_cli.chat.repl import COMMANDS

    commands = shown_commands()
    options: dict[str, dict[str, Any]] = {}
    for name, command in commands.items():
        for option in command.params:
            if option.param_type_name != "option":
                continue
            empty: dict[str, Any] = {
                "names": list(option.opts), "commands": [], "defaults": [], "helps": []
            }  # fmt: skip
            entry = options.setdefault(option.opts[0], empty)
            entry["commands"].append(name)
            _add(entry["defaults"], _shown(option.default), name)
            _add(entry["helps"], option.help.replace(r"\[", "["), name)
    return {
        "options": list(options.values()),
        "commands": {name: command.help.splitlines()[0] for name, command in commands.items()},
        "chat_commands": dict(COMMANDS),
    }


def shown_commands() -> dict[str, Any]:
    """The Typer commands that --help lists, in that order."""
    from typer.main import get_command

    from minisgl_cli import main

    group: Any = get_command(main.app)  # of click, or of the copy in Typer, by version
    names = group.list_commands(None)
    return {name: group.commands[name] for name in names if not group.commands[name].hidden}


def _shown(default: Any) -> str:
    """The default as text; '' if there is none."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (list, tuple)):  # of a repeatable option
        return ",".join(default)
    return "" if default is None else str(default)


def _add(rows: list[dict[str, Any]], text: str, command: str) -> None:
    for row in rows:
        if row["text"] == text:
            row["commands"].append(command)
            return
    rows.append({"text": text, "commands": [command]})
