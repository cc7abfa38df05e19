"""Paths that options name."""

from __future__ import annotations

from pathlib import Path

from minisgl.errors import ConfigError


def path_of(option: str, name: str) -> Path:
    """The file or folder that `option` names, with ~ as in a shell; it need not exist.

    Raises ConfigError where nobody can say whether it does: a name that is too long, the home of a
    user that there is not, or a folder that this process may not enter.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except OSError as error:
        reason = f"{error.strerror}; allowed: a path that this process may look up"
        raise ConfigError(option, name, reason) from error
    except RuntimeError:
        reason = "there is no such user, whose home ~ stands for; allowed: another path"
        raise ConfigError(option, name, reason) from None
    return path
