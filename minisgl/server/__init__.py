"""The OpenAI-compatible server."""

from __future__ import annotations

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal comes; from the main thread. Returns the exit code.

    Raises MinisglError where the address or a key cannot be had or the engine does not start.
    """
    # The command line imports this package for --help, which must be quick.
    from minisgl.server.keys import with_all_keys
    from minisgl.server.process import Process

    return Process(engine, with_all_keys(server)).run()
