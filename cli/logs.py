"""Logging of the commands: lines on stderr, as text or JSON, at a level that the user chooses."""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime

from minisgl.errors import ConfigError, one_of
from minisgl.printable import printable
from minisgl.server.config import JSON, LOG_LEVELS, TEXT


class PrintableFormatter(logging.Formatter):
    """Escapes control characters: a record may quote text from the network."""

    def __init__(self, name: str) -> None:
        """name: of this process; empty for the only one."""
        self._name = name
        process = f"{name}: " if name else ""
        super().__init__(
            f"%(asctime)s %(levelname)s {process}%(message)s", datefmt="%Y-%m-%d %H:%M:%S%z"
        )

    def of_process(self, name: str) -> PrintableFormatter:
        """That of a process which this one has started."""
        return PrintableFormatter(_joined(self._name, name))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class JSONFormatter(logging.Formatter):
    """Each record is an object in one line, in ASCII.

    A record whose `extra` has `fields` has these as members, in place of a message.
    """

    def __init__(self, name: str) -> None:
        """name: of this process; empty for the only one."""
        super().__init__()
        self._name = name

    def of_process(self, name: str) -> JSONFormatter:
        """That of a process which this one has started."""
        return JSONFormatter(_joined(self._name, name))

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        if self._name:
            line["process"] = self._name
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _joined(*names: str) -> str:
    return ", ".join(name for name in names if name)


def set_up_logging(
    default: str = "INFO", name: str = "", *, level: str | None = None, form: str = TEXT
) -> None:
    """Called once by a command, before it does anything. Raises ConfigError.

    name: of this process among several that write to the same log. level: in place of LOG_LEVEL,
    if given. form: TEXT or JSON.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter(name) if form == JSON else PrintableFormatter(name))
    logger = logging.getLogger("minisgl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level or log_level() or default)
    if form == JSON:  # warnings of other packages would be lines of another form
        logging.getLogger().handlers = [handler]


def log_level() -> str | None:
    """LOG_LEVEL, or None where it is not set."""
    level = os.environ.get("LOG_LEVEL", "").upper()
    if level and level not in LOG_LEVELS:
        raise ConfigError("LOG_LEVEL", level, one_of(LOG_LEVELS))
    return level or None
