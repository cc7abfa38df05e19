"""The key of a client: from an option, a file, or the environment."""

from __future__ import annotations

from typing import Any

from minisgl.errors import ConfigError
from minisgl.keys import FILE_OPTION, check_key, keys_of_environment, keys_of_file


def check_key_options(config: Any) -> None:
    """Reject invalid values of a config with `api_key` and `api_key_file`."""
    if config.api_key:
        check_key("--api-key", config.api_key)
        if config.api_key_file:
            allowed = "--api-key gives the key already; allowed: one of the two"
            raise ConfigError(FILE_OPTION, config.api_key_file, allowed)


def find_key(config: Any) -> str:
    """The key of such a config, else the environment's, else "". Raises ConfigError.

    The first one if there are several, as a server may have them there.
    """
    if config.api_key:
        return str(config.api_key)
    if config.api_key_file:
        return keys_of_file(config.api_key_file)[0]
    return next(iter(keys_of_environment()), "")
