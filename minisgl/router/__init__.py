"""Several engines behind one address: the parent process starts them, and routes requests."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.config import EngineConfig
from minisgl.router.config import RouterConfig
from minisgl.server import with_all_keys
from minisgl.server.config import ServerConfig


def run(
    engine: EngineConfig,
    server: ServerConfig,
    router: RouterConfig,
    *,
    replica: Sequence[str],
    front: Sequence[str],
) -> int:
    """Serve until a signal comes; from the main thread. Returns the exit code.

    replica, front: the commands that start a replica and a routing process, but for its index.
    Raises MinisglError if the address, a key or enough GPUs are unavailable.
    """
    # The command line imports this package for --help, which must be fast.
    from minisgl.router.process import RouterProcess

    server = with_all_keys(server)
    return RouterProcess(engine, server, router, replica=replica, front=front).run()
