"""The OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace

from minisgl.config import EngineConfig
from minisgl.keys import keys_of_environment, keys_of_file
from minisgl.server.config import ServerConfig


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal comes; from the main thread. Returns the exit code.

    Raises MinisglError where the address or a key cannot be had or the engine does not start.
    """
    # The command line imports this package for --help, which must be quick.
    from minisgl.server.process import ServerProcess

    return ServerProcess(engine, with_all_keys(server)).run()


def with_all_keys(config: ServerConfig) -> ServerConfig:
    """`config` with the keys of the environment and of its file among its own, each once.

    Raises ConfigError for a source without a key.
    """
    keys = [*config.api_key, *keys_of_environment()]
    if config.api_key_file is not None:
        keys += keys_of_file(config.api_key_file)
    return replace(config, api_key=tuple(dict.fromkeys(keys)))
