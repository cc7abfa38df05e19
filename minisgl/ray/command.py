"""`minisgl serve --ray`: runs the application until a signal comes."""

from __future__ import annotations

import logging
import signal
import threading

from minisgl.config import EngineConfig, refuse
from minisgl.errors import MinisglError
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig
from minisgl.server.tls import check_certificate

logger = logging.getLogger(__name__)

APP = "minisgl"


class RayError(MinisglError):
    """Ray could not be used, or not start the application."""


def run(
    engine: EngineConfig, server: ServerConfig, router: RouterConfig, options: RayConfig
) -> int:
    """See minisgl.ray.run."""
    if server.uds:
        refuse(server, "uds", "cannot be combined with --ray, whose proxies listen on a port")
    if server.ssl_certfile:
        check_certificate(server.ssl_certfile, server.ssl_keyfile)
    try:
        import ray
        from ray import serve
    except ImportError:
        refuse(options, "ray", "Ray is missing; pip install 'minisgl[ray]'")

    from minisgl.ray.deployments import build

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    ray.init(logging_level=logging.WARNING)
    try:
        application = build(engine, server, router, options, owns_address=True)
        address = {"host": server.host, "port": server.port}
        if server.ssl_certfile:
            address["ssl_certfile"] = server.ssl_certfile
            address["ssl_keyfile"] = server.ssl_keyfile or server.ssl_certfile
        serve.start(http_options=address)
        try:
            serve.run(application, name=APP)
        except RuntimeError as error:
            raise RayError(f"Ray could not start the engines: {error}") from error
        scheme = "https" if server.ssl_certfile else "http"
        logger.info("Serving on Ray at %s://%s:%d", scheme, server.host, server.port)
        stopping.wait()
        logger.info("Stopping; running requests have %g s", server.drain_timeout)
        return 0
    finally:
        serve.delete(APP)
        ray.shutdown()
