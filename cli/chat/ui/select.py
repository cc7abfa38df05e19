"""Chooses the user interface of a chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from .base import ChatUI


def open_ui(commands: Mapping[str, str], *, show_thinking: bool, plain: bool) -> ChatUI:
    """The terminal, or a `Pipe` if standard input or output is not one.

    `commands`: what each command does, by its name, for completion.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        from .terminal import Terminal

        return Terminal(commands, show_thinking=show_thinking, plain=plain)
    from .pipe import Pipe

    return Pipe(show_thinking=show_thinking)
