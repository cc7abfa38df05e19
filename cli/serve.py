"""`minisgl serve`: the OpenAI-compatible server, and the processes that it starts."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

from minisgl.config import EngineConfig
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import TEXT, ServerConfig

from .logs import set_up_logging
from .options import ModelArgument, of_model, takes_options

PROGRAM = (sys.executable, "-m", "minisgl")
REPLICA, ROUTER = "replica-process", "router-process"


@takes_options
def serve(
    engine: EngineConfig,
    server: ServerConfig,
    router: RouterConfig,
    ray: RayConfig,
    named: ModelArgument = "",
) -> int:
    """Serve a model over HTTP, with the API that OpenAI clients speak.

    \b
      minisgl serve                                     the bundled demo model
      minisgl serve Qwen/Qwen3-0.6B --port 8000 --open
      minisgl serve ./folder --api-key-file keys.txt --served-model-name mine
      minisgl serve Qwen/Qwen3-8B --max-model-len 16384 --quantization fp8
      minisgl serve Qwen/Qwen3-8B --replicas 4          an engine on each of four GPUs
    """
    engine = of_model(engine, named)
    if server.images == "refuse":  # the tower would take memory for nothing
        engine = replace(engine, image_rows=0)
    set_up_logging(level=server.log_level, form=server.log_format)
    logging.getLogger("minisgl.cli").info("minisgl is loading its libraries")
    if ray.ray:
        from minisgl.ray.command import run as run_on_ray

        return run_on_ray(engine, server, router, ray)
    if router.replicas > 1:
        from minisgl.router.process import RouterProcess

        logs = ["--log-format", server.log_format]
        if server.log_level:
            logs += ["--log-level", server.log_level]
        commands = {"replica": (*PROGRAM, REPLICA, *logs), "front": (*PROGRAM, ROUTER, *logs)}
        return _exited(RouterProcess(engine, server, router, **commands).run())
    from minisgl.server import run

    return _exited(run(engine, server))


def replica_process(index: int, log_format: str = TEXT, log_level: str | None = None) -> int:
    """Serve as a replica: the server of `serve --replicas` starts this."""
    set_up_logging(name=f"replica {index}", level=log_level, form=log_format)
    from minisgl.router.replica import run_replica

    return _exited(run_replica())


def router_process(index: int, log_format: str = TEXT, log_level: str | None = None) -> int:
    """Route requests to replicas: the server of `serve --replicas` starts this."""
    set_up_logging(name=f"router {index}", level=log_level, form=log_format)
    from minisgl.router.front import run_front

    return run_front()


def _exited(exit_code: int) -> int:
    if exit_code:
        # The engine has failed: its threads may hang in what it failed of, and an orderly exit
        # would wait for them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code
