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

    num_unanswered = asyncio.run(talk(engine, face))
    # A person has seen why; a program at the other end of a pipe looks at the exit code.
    return 1 if num_unanswered and not face.interactive else 0
