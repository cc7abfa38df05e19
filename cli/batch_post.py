"""Asks the server's application in this process, or a server, with one request of a batch."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from minisgl.client.address import api_base
from minisgl.client.errors import ServerError
from minisgl.client.exchange import open_stream
from minisgl.client.models import headers_of
from minisgl.config import EngineConfig

from .batch_file import BatchRequest, Failure, Response

LOCAL = "http://localhost"
Post = Callable[[BatchRequest], Awaitable[Response | Failure]]


@asynccontextmanager
async def own_application(config: EngineConfig) -> AsyncIterator[Post]:
    """An engine behind the routes of the server, without a socket. Raises MinisglError."""
    import httpx

    from minisgl.parts.vectors.host import check_task
    from minisgl.server.app import create_app
    from minisgl.server.config import ServerConfig
    from minisgl.server.engine_state import EngineState
    from minisgl.server.process import start_engine

    state = EngineState(ServerConfig(), options=config)
    engine = await start_engine(config)
    try:
        check_task(engine.vectors.task, "generate")
        state.start(engine)
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL, timeout=None) as client:

            async def post(request: BatchRequest) -> Response | Failure:
                request_id = uuid.uuid4().hex
                headers = {"content-type": "application/json", "x-request-id": request_id}
                answer = await client.post(request.url, content=request.body, headers=headers)
                return _response(answer.status_code, request_id, answer.content)

            yield post
    finally:
        await engine.close()


def server_at(url: str, api_key: str, timeout_s: float) -> Post:
    """A server of the OpenAI API at `url`."""
    base = api_base(url)

    async def post(request: BatchRequest) -> Response | Failure:
        request_id = uuid.uuid4().hex
        headers = {**headers_of(api_key), "x-request-id": request_id}
        target = base + request.url.removeprefix("/v1")
        try:
            async with open_stream(
                "POST", target, headers, request.body, timeout_s=timeout_s
            ) as stream:
                return _response(stream.head.status, request_id, await stream.whole())
        except ServerError as error:
            return Failure("request_failed", str(error))

    return post


def patient(post: Post) -> Post:
    """Asks again what was refused because the queue was full, when another request of the batch has
    been answered. Where there is no other, the refusal is the answer."""
    num_asked = 0
    refused: deque[asyncio.Future[None]] = deque()

    async def ask(request: BatchRequest) -> Response | Failure:
        nonlocal num_asked
        while True:
            num_asked += 1
            try:
                result = await post(request)
            finally:
                num_asked -= 1
            is_refused = isinstance(result, Response) and result.status_code == 429
            if not (is_refused and num_asked):
                break
            refused.append(asyncio.get_running_loop().create_future())
            await refused[-1]
        while refused:
            if not (turn := refused.popleft()).done():  # as where the batch is ended
                turn.set_result(None)
                break
        return result

    return ask


def _response(status: int, request_id: str, body: bytes) -> Response | Failure:
    try:
        msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return Failure("invalid_response", f"The server answers {status} without JSON.")
    return Response(status, request_id, msgspec.Raw(body))
