"""The options and commands of minisgl, as the demo model learns them: read from the real ones."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

from minisgl.bench.config import BenchConfig
from minisgl.config import EngineConfig, option_names
from minisgl.server.config import ServerConfig
from minisgl_cli import main
from minisgl_cli.repl import COMMANDS

# Which commands take the options of which class.
TAKEN_BY = {
    EngineConfig: ["serve", "chat", "bench"],
    ServerConfig: ["serve"],
    BenchConfig: ["bench"],
}


def tables() -> dict[str, Any]:
    """The tables as JSON: `options`, `commands` of minisgl, and the `chat_commands` of the REPL."""
    return {
        "options": [
            {
                "names": list(option_names(spec)),
                "default": _shown(spec.default),
                "help": spec.metadata["help"],
                "commands": commands,
            }
            for config, commands in TAKEN_BY.items()
            for spec in fields(config)
        ],
        "commands": {
            command.callback.__name__: (inspect.getdoc(command.callback) or "").splitlines()[0]
            for command in main.app.registered_commands
            if command.callback is not None
        },
        "chat_commands": dict(COMMANDS),
    }


def _shown(default: Any) -> str:
    """'' stands for no default."""
    if default is None or default == () or default is MISSING:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)
