"""Where the log goes and how much of it: plain lines on stderr, as much as LOG_LEVEL asks for."""

from __future__ import annotations

import logging
import os

from minisgl.errors import ConfigError, one_of
from minisgl.printable import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class PrintableFormatter(logging.Formatter):
    """What others have sent may be in a line or in an exception; it must not drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(default: str = "INFO") -> None:
    """Called once by a command, before it does anything. Raises ConfigError."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        PrintableFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
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
