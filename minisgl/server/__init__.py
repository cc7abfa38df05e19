"""The OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from minisgl.config import EngineConfig, with_torchrun
from minisgl.errors import CallerError, ConfigError, MinisglError
from minisgl.keys import keys_of_environment, keys_of_file, named_key
from minisgl.server.config import ADMIN_VARIABLE, ServerConfig

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
    if placed.node_rank:
        return _run_worker_node(placed)
    # The command line imports this package for --help, which must be fast.
    from minisgl.server.process import ServerProcess

    return ServerProcess(placed, with_all_keys(server)).run()


def _run_worker_node(config: EngineConfig) -> int:
    """Run the ranks of this node until node 0 ends them. Returns the exit code: 0 if node 0 has
    ended in order, 1 if the engine has failed.

    Raises CallerError if this node cannot take part.
    """
    from minisgl.engine.startup import work_for_node_0  # imports torch, which takes seconds

    logger.info(
        "Node %d of %d: works for node 0 at %s port %d, and serves no HTTP",
        config.node_rank,
        config.nnodes,
        config.master_addr,
        config.master_port,
    )
    try:
        work_for_node_0(config)
    except CallerError:
        raise
    except MinisglError as error:
        logger.error("This node ends: %s", error)
        return error.exit_code
    return 0


def with_all_keys(config: ServerConfig) -> ServerConfig:
    """`config` with the keys of the environment and of its key file added, without duplicates, of
    which one with a name stays.

    Raises ConfigError for a source without a key, and for loading adapters without the admin's.
    """
    keys = [*config.api_key, *keys_of_environment()]
    if config.api_key_file is not None:
        keys += keys_of_file(config.api_key_file)
    admin_key = config.admin_key or os.environ.get(ADMIN_VARIABLE, "")
    if config.lora_root and not admin_key:
        reason = f"loading adapters needs a key; allowed: with --admin-key or {ADMIN_VARIABLE}"
        raise ConfigError("--lora-root", config.lora_root, reason)
    if config.trainer and not admin_key:
        reason = f"replacing weights needs a key; allowed: with --admin-key or {ADMIN_VARIABLE}"
        raise ConfigError("--trainer", True, reason)
    if keys and admin_key:
        keys.append(admin_key)
    by_key: dict[str, str] = {}
    for given in keys:
        name, key = named_key(given)
        if name or key not in by_key:
            by_key[key] = given
    return replace(config, api_key=tuple(by_key.values()), admin_key=admin_key)
