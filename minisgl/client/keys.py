"""Which key a client brings: that of an option, of a file, or of the environment."""

from __future__ import annotations

import os
import re
from typing import Any

from minisgl.errors import ConfigError

VARIABLE = "MINISGL_API_KEY"
MAX_CHARS = 8192
ALLOWED = "allowed: ASCII without spaces"  # a header carries nothing else


def check_key_options(config: Any) -> None:
    """Refuse values that can never be right, of a config with `api_key` and `api_key_file`."""
    if config.api_key:
        _check("--api-key", config.api_key)
        if config.api_key_file:
            allowed = "--api-key gives the key already; allowed: one of the two"
            raise ConfigError("--api-key-file", config.api_key_file, allowed)


def find_key(config: Any) -> str:
    """The key of such a config, else the environment's, else none. Raises ConfigError."""
    if config.api_key:
        return str(config.api_key)
    if config.api_key_file:
        return _read(config.api_key_file)
    key = os.environ.get(VARIABLE, "").strip()
    if key:
        _check(VARIABLE, key)
    return key


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            key = file.read(MAX_CHARS + 1).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("--api-key-file", path, f"cannot be read: {reason}") from error
    if not key or not _is_key(key):
        raise ConfigError("--api-key-file", path, "allowed: a file with one key and nothing else")
    return key


def _check(option: str, key: str) -> None:
    if not _is_key(key):
        raise ConfigError(option, "(not shown)", ALLOWED)


def _is_key(text: str) -> bool:
    return len(text) <= MAX_CHARS and re.fullmatch("[!-~]+", text) is not None
