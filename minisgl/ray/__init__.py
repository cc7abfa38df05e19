"""The server on a Ray cluster: an HTTP ingress and engines, as deployments of Ray Serve.

`serve run minisgl.ray:app` and `minisgl serve --ray` run the same application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Build the application from options, as Ray Serve's tools call it: `model=... tp=2`.

    args: options of `minisgl serve` by their names, as texts or as values. Raises ConfigError.
    """
    # The command line imports this package for --help, which must be fast.
    from minisgl.ray.arguments import options_of
    from minisgl.ray.deployments import build

    return build(*options_of(args))
