"""A serving process whose chat template does not end.

`python tests/support/endless_template_server.py '{"port": 0}'`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess

sys.path.append(str(Path(__file__).parent.parent))
from support.engine_loop import ScriptedRunner, loaded

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def start(config: EngineConfig) -> AsyncEngine:
    engine = AsyncEngine(loaded(ScriptedRunner(page_size=16), overlap=True, tokenizer=True))
    assert engine.tokenizer is not None
    engine.tokenizer._tokenizer.chat_template = ENDLESS
    return engine


if __name__ == "__main__":
    options = ServerConfig(**json.loads(sys.argv[1]))
    sys.exit(ServerProcess(EngineConfig(), options, start).run())
