"""A serving process with the real engine, on a device that dies once COUNT requests are there.

`python tests/support/scripted_server.py COUNT '{"port": 0}'`
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.errors import EngineStoppedError
from minisgl.scheduler.plan import StepResult
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess

sys.path.append(str(Path(__file__).parent.parent))
from support.engine_loop import ScriptedRunner, loaded


class DyingRunner(ScriptedRunner):
    def __init__(self, count: int) -> None:
        super().__init__(page_size=16)
        self.count = count
        self.engine: AsyncEngine | None = None

    def collect(self, handle: StepResult) -> StepResult:
        """No step ends, so that no request does before the last one has come."""
        while self._num_requests() < self.count:
            time.sleep(0.005)
        raise EngineStoppedError("The device is gone.")

    def _num_requests(self) -> int:
        assert self.engine is not None
        stats = self.engine.stats()
        return stats.num_running + stats.num_queued


async def start(config: EngineConfig) -> AsyncEngine:
    runner = DyingRunner(int(sys.argv[1]))
    runner.engine = AsyncEngine(
        loaded(runner, overlap=True, tokenizer=True, max_running_requests=2)
    )
    return runner.engine


if __name__ == "__main__":
    options = ServerConfig(**json.loads(sys.argv[2]))
    sys.exit(ServerProcess(EngineConfig(), options, start).run())
