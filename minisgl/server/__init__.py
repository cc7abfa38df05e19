"""The OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from minisgl.config import EngineConfig, with_torchrun
from minisgl.keys import keys_of_environment, keys_of_file
from minisgl.server.config import ServerConfig

logger = logging.getLogger(__name__)


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal comes; from the main thread. Returns the exit code.

    A node other than 0 serves nothing: it works for node 0 until that ends. Of the processes of
    torchrun, the first of each node does everything. Raises MinisglError if the address or a key is
    unavailable or the engine does not start.
    """
    placed = with_torchrun(engine, os.environ)
    if placed is None:
        logger.info("The process of local rank 0 starts the ranks of this node; this one ends")
        return 0
    # The command line imports this package for --help, which must be fast.
    if placed.node_rank:
        from minisgl.server.worker_node import run_worker_node

        return run_worker_node(placed)
    from minisgl.server.process import ServerProcess

    return ServerProcess(placed, with_all_keys(server)).run()


def with_all_keys(config: ServerConfig) -> ServerConfig:
    """`config` with the keys of the environment and of its key file added, without duplicates.

    Raises ConfigError for a source without a key.
    """
    keys = [*config.api_key, *keys_of_environment()]
    if config.api_key_file is not None:
        keys += keys_of_file(config.api_key_file)
    return replace(config, api_key=tuple(dict.fromkeys(keys)))
