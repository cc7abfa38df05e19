"""A server that sends any bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    answers: dict[str, bytes | Answering]  # by the path, or "" for every other one
    port: int = 0
    heads: list[str] = field(default_factory=list)  # of the requests
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.writers.append(writer)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()
            self.tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split()[1]
        answer = self.answers[path if path in self.answers else ""]
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            await answer(writer)


@asynccontextmanager
async def raw_server(
    answers: dict[str, bytes | Answering], *, ssl: SSLContext | None = None
) -> AsyncIterator[RawServer]:
    made = RawServer(answers)
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0, ssl=ssl)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks)
        for writer in made.writers:  # TLS also waits for a word of the other side
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def again(piece: bytes, *, head: bytes = HEAD, pause_s: float = 0.0) -> Answering:
    """Repeats the bytes without end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


def redirect(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()
