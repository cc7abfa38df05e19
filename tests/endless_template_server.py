"""A serving process whose chat template does not end: `python tests/endless_template_server.py`
with ServerConfig's options as JSON."""

from __future__ import annotations

import json
import sys

from test_engine import ScriptedRunner, loaded

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def start(config: EngineConfig) -> AsyncEngine:
    engine = AsyncEngine(loaded(ScriptedRunner(page_size=16), overlap=True, tokenizer=True))
    assert engine.tokenizer is not None
    engine.tokenizer._tokenizer.chat_template = ENDLESS
    return engine


if __name__ == "__main__":
    options = ServerConfig(**json.loads(sys.argv[1]))
    sys.exit(ServerProcess(EngineConfig(), options, start).run())
