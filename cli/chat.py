"""`minisgl chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio

from minisgl.config import EngineConfig

from .logs import set_up_logging
from .options import takes_options


@takes_options
def chat(engine: EngineConfig) -> int:
    """Talk to a model in the terminal; piped in, each line is a question."""
    set_up_logging(default="WARNING")
    from .terminal import open_face

    face = open_face()
    with face.busy("Loading the libraries"):
        from .repl import talk

    asyncio.run(talk(engine, face))
    return 0
