"""`minisgl` whose long answers do not end: nothing comes after HELD_AFTER tokens until the client
leaves, as with Ctrl-C. Short answers end before. Run as a script it is a whole process."""

from __future__ import annotations

import asyncio
import sys

from minisgl.engine.stream import OutputStream
from minisgl_cli.main import main

HELD_AFTER = 40


def held_main() -> int:
    take = OutputStream.__anext__

    async def held(stream: OutputStream) -> object:
        if stream._num_taken >= HELD_AFTER:
            await asyncio.Event().wait()
        return await take(stream)

    OutputStream.__anext__ = held  # type: ignore[assignment, method-assign]
    sys.argv[0] = "minisgl"
    return main()


if __name__ == "__main__":
    sys.exit(held_main())
