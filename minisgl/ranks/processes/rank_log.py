"""The log lines of ranks, in the form in which the process that has started them writes its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

# The formatter for a process of this name.
LogForm: TypeAlias = Callable[[str], logging.Formatter]


def text_form(name: str) -> logging.Formatter:
    return logging.Formatter(f"{name}: %(message)s")


def own_form() -> LogForm:
    """The form of this process, for others that it starts: `of_process` of its formatter."""
    for handler in logging.getLogger("minisgl").handlers:
        form: LogForm | None = getattr(handler.formatter, "of_process", None)
        if form is not None:
            return form
    return text_form


def begin_log(rank: int, form: LogForm) -> None:
    """Write warnings, also those of other packages, to stderr. Called once by a rank."""
    handler = logging.StreamHandler()
    handler.setFormatter(form(f"rank {rank}"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
