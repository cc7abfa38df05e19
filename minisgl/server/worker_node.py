"""The life of `minisgl serve` on a node other than 0, which serves no HTTP."""

from __future__ import annotations

import logging

from minisgl.config import EngineConfig
from minisgl.errors import CallerError, MinisglError

logger = logging.getLogger(__name__)


def run_worker_node(config: EngineConfig) -> int:
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
