"""`serve --replicas` with fake engines, without the command line.

`python tests/support/fake_replicas.py ENGINE SERVER ROUTER`, each a JSON object of options: ENGINE
of FakeEngine, or its `load_error`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
from minisgl.config import EngineConfig
from minisgl.errors import MinisglError
from minisgl.router.config import RouterConfig
from minisgl.router.front import run_front
from minisgl.router.process import RouterProcess
from minisgl.router.replica import run_replica
from minisgl.server.config import ServerConfig


def replica(behaviour: dict[str, object]) -> int:
    from support.fake_engine import FakeEngine  # which takes a moment

    load_error = behaviour.pop("load_error", None)

    async def start(config: EngineConfig) -> FakeEngine:
        await asyncio.sleep(0)
        if load_error:
            raise MinisglError(str(load_error))
        return FakeEngine(**behaviour)  # type: ignore[arg-type]

    return run_replica(start)  # type: ignore[arg-type]


def main() -> int:
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        if sys.argv[1] == "replica":
            return replica(json.loads(sys.argv[2]))
        if sys.argv[1] == "router":
            return run_front()
        behaviour, server, router = sys.argv[1:]
        itself = (sys.executable, __file__)
        process = RouterProcess(
            EngineConfig(model="fake", device="cpu", max_loras=1),
            ServerConfig(
                **{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(server).items()}
            ),
            RouterConfig(**json.loads(router)),
            replica=(*itself, "replica", behaviour),
            front=(*itself, "router"),
        )
        return process.run()
    except MinisglError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
