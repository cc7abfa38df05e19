"""A serving process whose chat template does not end. It prints ASKED for each conversation.

`python tests/support/endless_template_server.py '{"port": 0}'`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.images.prompt import Prompt
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess

sys.path.append(str(Path(__file__).parent.parent))
from support.engine_loop import ScriptedRunner, loaded

ASKED = "a conversation has come"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def start(config: EngineConfig) -> AsyncEngine:
    engine = AsyncEngine(loaded(ScriptedRunner(page_size=16), overlap=True, tokenizer=True))
    assert engine.tokenizer is not None
    engine.tokenizer._tokenizer.chat_template = ENDLESS
    encode = engine.encode_conversation

    def encode_noted(*arguments: Any, **options: Any) -> Awaitable[Prompt]:
        print(ASKED, file=sys.stderr, flush=True)
        return encode(*arguments, **options)

    engine.encode_conversation = encode_noted  # type: ignore[assignment, method-assign]
    return engine


if __name__ == "__main__":
    options = ServerConfig(**json.loads(sys.argv[1]))
    sys.exit(ServerProcess(EngineConfig(), options, start).run())
