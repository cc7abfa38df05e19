"""Listens on a Unix socket, for a proxy on the same machine."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from minisgl.errors import ConfigError

OPTION = "--uds"


def bind_unix(path: str) -> socket.socket:
    """Bind a socket at `path` that only this user may connect to; raises ConfigError.

    The socket file of a server that has ended is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            OPTION, path, f"{reason}; allowed: a path where a socket can be made"
        ) from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(OPTION, path, "exists and is no socket; allowed: a path that is free")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(OPTION, path, "a server listens there; allowed: a path that is free")


class OwnPath:
    """The file of a listening socket; removed at exit unless another server has replaced it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.stat(path).st_ino

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
