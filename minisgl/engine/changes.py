"""Changes of a running engine, such as adapters that come and weights that are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Makes one change after the other. Used on the engine's loop."""

    def __init__(self) -> None:
        self._changing = asyncio.Lock()

    async def make(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change, to its end also if who has asked for it leaves meanwhile."""

        async def changed() -> T:
            async with self._changing:
                return await change

        return await asyncio.shield(asyncio.ensure_future(changed()))
