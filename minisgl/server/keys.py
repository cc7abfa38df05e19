"""The API keys of a server, from everywhere they may be given."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig, check_key

VARIABLE = "MINISGL_API_KEY"
FILE_OPTION = "--api-key-file"
MAX_FILE_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def with_all_keys(config: ServerConfig) -> ServerConfig:
    """`config` with the keys of the environment and of its file among its own, each once.

    Raises ConfigError for a source without a key, which may leave the server open by mistake.
    """
    keys = [*config.api_key]
    if VARIABLE in os.environ:
        keys += _checked(VARIABLE, re.split(r"[\s,]+", os.environ[VARIABLE]))
    if config.api_key_file is not None:
        keys += _checked(FILE_OPTION, _lines(config.api_key_file))
    return replace(config, api_key=tuple(dict.fromkeys(keys)))


def _checked(source: str, found: Iterable[str]) -> list[str]:
    keys = [key for key in found if key]
    if not keys:
        raise ConfigError(source, "(without a key)", "allowed: one or more keys")
    for key in keys:
        check_key(source, key)
    return keys


def _lines(path: str) -> Iterator[str]:
    """The key of each line; raises ConfigError where there is more in it than a key."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        key, *rest = line.split() or [""]
        if key.startswith("#"):
            continue
        if rest and not rest[0].startswith("#"):
            allowed = f"line {number} is more than one word; allowed: a key a line, # comments"
            raise ConfigError(FILE_OPTION, path, allowed)
        yield key


def _read(path: str) -> str:
    allowed = f"allowed: a text of up to {MAX_FILE_BYTES >> 10} KiB"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(FILE_OPTION, path, f"too large; {allowed}")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(FILE_OPTION, path, f"{error.strerror}; {allowed}") from error
    except UnicodeDecodeError:
        raise ConfigError(FILE_OPTION, path, f"not UTF-8; {allowed}") from None
    if mode & stat.S_IROTH:
        logger.warning("Everybody on this machine can read the API keys in %s", path)
    return text
