"""The secret that all nodes of an engine share."""

from __future__ import annotations

import ipaddress
import os

from minisgl.config import HIDDEN, EngineConfig, ResolvedConfig
from minisgl.errors import ConfigError
from minisgl.keys import read_secret

VARIABLE = "MINISGL_CLUSTER_TOKEN"
OPTION = "--cluster-token-file"
MIN_CHARS = 16
MAX_BYTES = 4096


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
        file = config.cluster_token_file
        source, text = OPTION, read_secret(OPTION, file, holds="the secret", max_bytes=MAX_BYTES)
    token = text.strip()
    if (source == OPTION or token) and len(token) < MIN_CHARS:
        raise ConfigError(source, HIDDEN, f"allowed: {MIN_CHARS} characters or more")
    return token.encode("utf-8", "surrogateescape")
