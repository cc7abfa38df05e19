"""One HTTP request and the body of its answer as it comes, on asyncio and httptools.

Both are here anyway; a client library would be one more dependency for two calls.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

import httptools

from minisgl.bench.address import unreachable
from minisgl.errors import MinisglError

CONNECT_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16


class ServerError(MinisglError):
    """A server cannot be reached, refuses a request or breaks off."""


@dataclass(slots=True)
class HttpAnswer:
    """The status, and the body in `pieces` while it comes in."""

    reader: asyncio.StreamReader
    status: int = 0
    ended: bool = False
    _body: list[bytes] = field(default_factory=list)
    _parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    # Called by the parser.
    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.ended = self.status >= 200  # 100 announces the answer proper

    async def read_head(self) -> None:
        while self.status < 200:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            body, self._body = self._body, []
            if body:
                yield b"".join(body)
            elif self.ended:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        data = await self.reader.read(READ_BYTES)
        if data:
            self._parser.feed_data(data)
        elif self.status >= 200:
            self.ended = True  # the end of the connection may be that of the body
        else:
            raise ConnectionError("the connection was closed without an answer")


@asynccontextmanager
async def request(
    method: str, url: str, headers: dict[str, str], body: bytes = b""
) -> AsyncIterator[HttpAnswer]:
    """Sends a request; leaving the context closes its connection. Raises ServerError."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await _connect(parts)
    except TimeoutError as error:
        reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        raise ServerError(f"{url} cannot be reached: {reason}.") from error
    except OSError as error:
        raise ServerError(unreachable(url, error)) from error
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {path or '/'} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
    fixed = {"connection": "close", "content-length": str(len(body))}
    lines += [f"{name}: {value}" for name, value in {**headers, **fixed}.items()]
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        answer = HttpAnswer(reader)
        await answer.read_head()
        yield answer
    except OSError as error:
        raise ServerError(f"{url}: {error.strerror or error}.") from error
    except httptools.HttpParserError as error:
        raise ServerError(f"{url} does not answer in HTTP: {error}.") from error
    finally:
        writer.transport.abort()


async def _connect(parts: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = parts.scheme == "https"
    return await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
    )
