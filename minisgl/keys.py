"""API keys from outside the command line, which other users of a machine can read.

A server takes all keys that it finds, a client the first. They read the same file and variable.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator

from minisgl.config import HIDDEN
from minisgl.errors import ConfigError

VARIABLE = "MINISGL_API_KEY"
FILE_OPTION = "--api-key-file"
MAX_FILE_BYTES = 1 << 20
MAX_KEY_CHARS = 8192
MARK = ": "  # between the name of a key and the key, which has no space
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")

logger = logging.getLogger(__name__)


def keys_of_environment() -> list[str]:
    """The keys in MINISGL_API_KEY, which commas or spaces separate; none if it is not set.

    Raises ConfigError where it is set and holds no key, which may leave a server open by mistake.
    """
    if VARIABLE not in os.environ:
        return []
    return _checked(VARIABLE, re.split(r"[\s,]+", os.environ[VARIABLE]))


def keys_of_file(path: str) -> list[str]:
    """The keys in a file, some perhaps with names: one a line, # begins a comment. Raises
    ConfigError."""
    return _checked(FILE_OPTION, _lines(path))


def check_key(source: str, key: str) -> None:
    """Raise ConfigError for a key that no header can carry, and so nobody could use."""
    if len(key) > MAX_KEY_CHARS or not re.fullmatch("[!-~]+", key):
        allowed = f"allowed: 1 to {MAX_KEY_CHARS} characters of ASCII without spaces"
        raise ConfigError(source, HIDDEN, allowed)


def named_key(given: str) -> tuple[str, str]:
    """The name, empty if there is none, and the key of KEY or NAME: KEY."""
    name, _, key = given.rpartition(MARK)
    return name, key


def check_named_key(source: str, given: str) -> None:
    """Raise ConfigError for a key as `check_key` does, and for a name that logs could not show."""
    name, key = named_key(given)
    if (name or key != given) and not NAME.fullmatch(name):
        allowed = "allowed for a name: up to 64 letters, digits, dots, _ and -, a letter first"
        raise ConfigError(source, HIDDEN, allowed)
    check_key(source, key)


def _checked(source: str, found: Iterable[str]) -> list[str]:
    keys = [key for key in found if key]
    if not keys:
        raise ConfigError(source, "(without a key)", "allowed: one or more keys")
    for key in keys:
        check_named_key(source, key)
    return keys


def _lines(path: str) -> Iterator[str]:
    """The key of each line, after its name if it has one; raises ConfigError where there is more
    in it."""
    text = read_secret(FILE_OPTION, path, holds="the API keys", max_bytes=MAX_FILE_BYTES)
    for number, line in enumerate(text.splitlines(), 1):
        key, *rest = line.split() or [""]
        if key.startswith("#"):
            continue
        name = ""
        if key.endswith(":") and rest and not rest[0].startswith("#"):
            name, (key, *rest) = key + " ", rest
        if rest and not rest[0].startswith("#"):
            allowed = f"line {number} is more than one word; allowed: a key a line, or NAME: KEY"
            raise ConfigError(FILE_OPTION, path, allowed)
        yield name + key


def read_secret(option: str, path: str, *, holds: str, max_bytes: int) -> str:
    """The text of the file that `option` names. holds: what is in it, for a warning where everybody
    can read it. Raises ConfigError."""
    allowed = f"allowed: a text of up to {max_bytes >> 10} KiB"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ConfigError(option, path, f"too large; {allowed}")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(option, path, f"{error.strerror}; {allowed}") from error
    except UnicodeDecodeError:
        raise ConfigError(option, path, f"not UTF-8; {allowed}") from None
    except ValueError:  # a path with a null character
        raise ConfigError(option, repr(path), f"not a path; {allowed}") from None
    warn_if_open(mode, path, holds=holds)
    return text


def warn_if_open(mode: int, path: str, *, holds: str) -> None:
    """Warn if everybody can read a file with this mode. holds: what is in it."""
    if mode & stat.S_IROTH:
        logger.warning("Everybody on this machine can read %s in %s", holds, path)
