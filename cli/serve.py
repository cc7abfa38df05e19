"""`minisgl serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve a model over HTTP, with the API that OpenAI clients speak."""
    set_up_logging()
    from minisgl.server import run

    exit_code = run(engine, server)
    if exit_code:
        # The engine has failed: its threads may hang in what it failed of, and an orderly exit
        # would wait for them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code
