"""`minisgl serve --ray`: runs the application until a signal comes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from minisgl.config import EngineConfig, refuse
from minisgl.errors import ConfigError, MinisglError
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig
from minisgl.server.http.listening import check_certificate
from minisgl.server.process import ENDING, bind

logger = logging.getLogger(__name__)

APP = "minisgl"


class RayError(MinisglError):
    """Ray could not be used, or not start the application."""


def run(
    engine: EngineConfig, server: ServerConfig, router: RouterConfig, options: RayConfig
) -> int:
    """Serve on the cluster of this machine, or of RAY_ADDRESS, until a signal comes.

    Starts a cluster of this machine alone if there is none. Returns the exit code; raises
    MinisglError if Ray is not installed, an option does not go with it or no engine starts.
    """
    if server.uds:
        refuse(server, "uds", "cannot be combined with --ray, whose proxies listen on a port")
    if not server.port:
        refuse(server, "port", "with --ray the port must be known; allowed: 1 to 65535")
    if server.ssl_certfile:
        check_certificate(server.ssl_certfile, server.ssl_keyfile)
    try:
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException
    except ImportError:
        refuse(options, "ray", "Ray is not installed; pip install 'ray[serve]>=2.60'")

    from minisgl.ray.deployments import build

    ray.init(logging_level=logging.WARNING)
    for number in ENDING:  # after Ray has set handlers of its own
        signal.signal(number, signal.default_int_handler)
    application = build(engine, server, router, options, owns_address=True)
    address = {"host": server.host, "port": server.port}
    if server.ssl_certfile:
        address["ssl_certfile"] = server.ssl_certfile
        address["ssl_keyfile"] = server.ssl_keyfile or server.ssl_certfile
    try:
        serve.start(http_options=address)
        serve.run(application, name=APP)  # which logs the URL
        while True:
            signal.pause()
    except KeyboardInterrupt:
        logger.info("Stopping; running requests have %g s", server.drain_timeout)
        return 0
    except RuntimeError as error:
        raise why_not_started(error, server, serve.status().applications) from error
    finally:
        with suppress(RayServeException):  # if it was not running yet
            serve.delete(APP)
        ray.shutdown()


def why_not_started(
    error: RuntimeError, server: ServerConfig, applications: Mapping[str, Any]
) -> MinisglError:
    """What a user should know of the failure of Ray Serve.

    applications: by their names, as Ray Serve reports them. Without ours it has begun no engine.
    """
    deployments = {}
    if APP in applications:
        deployments = applications[APP].deployments
    else:  # a proxy that cannot listen ends, and the error does not say why
        try:
            bind(server).close()
        except ConfigError as unavailable:
            return unavailable
    reasons = [each.message.strip() for each in deployments.values() if each.message]
    why = ([*reasons, str(error)][0].splitlines() or ["no reason given"])[-1]  # of a traceback
    return RayError(f"Ray could not start {'the engines' if deployments else 'Serve'}: {why}")
