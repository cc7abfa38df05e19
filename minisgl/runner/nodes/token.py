"""The secret that all nodes of an engine share."""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from pathlib import Path

from minisgl.config import HIDDEN, EngineConfig, ResolvedConfig
from minisgl.errors import ConfigError

VARIABLE = "MINISGL_CLUSTER_TOKEN"
OPTION = "--cluster-token-file"
MIN_CHARS = 16
MAX_BYTES = 4096

logger = logging.getLogger(__name__)


def cluster_token(config: ResolvedConfig, address: str) -> bytes:
    """The secret that the nodes share; empty if there is none.

    address: the IP address of node 0. Raises ConfigError if the secret is unusable, or missing for
    an address beyond loopback.
    """
    token = read_token(config)
    if not token and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            "--master-addr",
            config.master_addr,
            f"beyond this machine the nodes need a shared secret: set {VARIABLE} or {OPTION} on "
            "each, to the output of `openssl rand -hex 32`",
        )
    return token


def read_token(config: EngineConfig | ResolvedConfig) -> bytes:
    """The secret of the file or else of the environment; empty if there is none.

    Raises ConfigError if it is unusable.
    """
    source, text = VARIABLE, os.environ.get(VARIABLE, "")
    if config.cluster_token_file:
        source, text = OPTION, _read(config.cluster_token_file)
    token = text.strip()
    if (source == OPTION or token) and len(token) < MIN_CHARS:
        raise ConfigError(source, HIDDEN, f"allowed: {MIN_CHARS} characters or more")
    return token.encode("utf-8", "surrogateescape")


def _read(path: str) -> str:
    allowed = f"allowed: a text file of up to {MAX_BYTES} bytes"
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(OPTION, path, f"too large; {allowed}")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(OPTION, path, f"{error.strerror}; {allowed}") from error
    except UnicodeDecodeError:
        raise ConfigError(OPTION, path, f"not UTF-8; {allowed}") from None
    except ValueError:  # a path with a null character
        raise ConfigError(OPTION, repr(path), f"not a path; {allowed}") from None
    if mode & stat.S_IROTH:
        logger.warning("Everybody on this machine can read the secret in %s", path)
    return text
