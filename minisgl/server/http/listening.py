"""Checks, before anything slow starts, what a server listens with: a certificate, a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat

from minisgl.errors import ConfigError

OPTION = "--uds"


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raise ConfigError unless the files are usable; without `keyfile`, `certfile` has both."""
    _check_readable("--ssl-certfile", certfile)
    if keyfile:
        _check_readable("--ssl-keyfile", keyfile)

    def refuse_password() -> str:  # OpenSSL would ask for it at the terminal
        raise ConfigError(
            "--ssl-keyfile", keyfile or certfile, "has a password; allowed: a key without one"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile or None, refuse_password)
    except ssl.SSLError as error:
        files = f"{certfile} with {keyfile}" if keyfile else certfile
        raise ConfigError(
            "--ssl-certfile",
            files,
            f"cannot be used ({error.reason or 'no PEM'}); "
            "allowed: a certificate and its own key, in PEM",
        ) from error


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        reason = f"{error.strerror}; allowed: a PEM file that can be read"
        raise ConfigError(option, path, reason) from error


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
