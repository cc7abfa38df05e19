"""Changes of a running engine, such as adapters that come and weights that are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Changing(Protocol):
    changing: asyncio.Lock  # held by the change that is being made


S = TypeVar("S", bound=Changing)
P = ParamSpec("P")
T = TypeVar("T")


def in_turn(
    change: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """A method that makes a change when those before have been made, and to its end also if who has
    asked for it leaves meanwhile. Used on the engine's loop."""

    @wraps(change)
    async def asked(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        async def made() -> T:
            async with self.changing:
                return await change(self, *arguments, **options)

        return await asyncio.shield(asyncio.ensure_future(made()))

    return asked
