"""Checks the certificate of a server before anything slow starts."""

from __future__ import annotations

import ssl

from minisgl.errors import ConfigError


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
