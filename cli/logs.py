"""Logging of the commands: plain lines on stderr, at the level of LOG_LEVEL."""

from __future__ import annotations

import logging
import os

from minisgl.errors import ConfigError, one_of
from minisgl.printable import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class PrintableFormatter(logging.Formatter):
    """Escapes control characters: a record may quote text from the network."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(default: str = "INFO", name: str = "") -> None:
    """Called once by a command, before it does anything. Raises ConfigError.

    name: of this process among several that write to the same log.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        PrintableFormatter(f"%(asctime)s %(levelname)s {name}%(message)s", datefmt="%H:%M:%S")
    )
    logger = logging.getLogger("minisgl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(log_level() or default)


def log_level() -> str | None:
    """LOG_LEVEL, or None where it is not set."""
    level = os.environ.get("LOG_LEVEL", "").upper()
    if level and level not in LEVELS:
        raise ConfigError("LOG_LEVEL", level, one_of(LEVELS))
    return level or None
