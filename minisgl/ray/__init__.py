"""The server on a Ray cluster: an HTTP ingress and engines, as deployments of Ray Serve.

`serve run minisgl.ray:app` and `minisgl serve --ray` run the same application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.config import EngineConfig
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig


def app(args: Mapping[str, Any]) -> Any:
    """Build the application from options, as Ray Serve's tools call it: `model=... tp=2`.

    args: options of `minisgl serve` by their names, as texts or as values. Raises ConfigError.
    """
    # The command line imports this package for --help, which must be fast.
    from minisgl.ray.arguments import options_of
    from minisgl.ray.deployments import build

    return build(*options_of(args))


def run(engine: EngineConfig, server: ServerConfig, router: RouterConfig, ray: RayConfig) -> int:
    """Serve on the cluster of this machine, or of RAY_ADDRESS, until a signal comes.

    Starts a cluster of this machine alone if there is none. Returns the exit code; raises
    MinisglError if Ray is not installed, an option does not go with it or no engine starts.
    """
    from minisgl.ray.command import run

    return run(engine, server, router, ray)
