"""The certificate of a server, looked at before anything slow begins."""

from __future__ import annotations

import ssl

from minisgl.errors import ConfigError


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raise ConfigError unless the server can use these files; without a `keyfile` one holds both.

    A key with a password would otherwise be asked for at the terminal.
    """
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            with open(path or certfile, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(
                option, path, f"{error.strerror}; allowed: a PEM file that can be read"
            ) from error

    def refuse_password() -> str:
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
            f"{error.reason or error}; allowed: a certificate and its key, as PEM",
        ) from error
