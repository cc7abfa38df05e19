"""`minisgl serve`: the OpenAI-compatible server."""

from __future__ import annotations

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve a model over HTTP, with the API that OpenAI clients speak."""
    set_up_logging()
    from minisgl.server import run

    return run(engine, server)
