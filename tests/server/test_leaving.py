"""Handlers whose client leaves, in any turn of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope
from support.fake_engine import FakeEngine
from support.waiting import until

from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.http.leaving import while_client_waits


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("later", range(-4, 5))
async def test_a_client_that_leaves_as_the_handler_ends_never_cancels_what_follows(
    later: int,
) -> None:
    """later: turns of the loop between the end of the handler and the leaving."""
    left, ready = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> str:
        async with while_client_waits(receive):
            await ready.wait()
        await turns(10)  # as an answer is sent
        return "sent"

    answering = asyncio.ensure_future(answer())
    await turns(5)
    first, second = (ready, left) if later > 0 else (left, ready)
    first.set()
    await turns(abs(later))
    second.set()
    try:
        assert await answering == "sent"
    except ClientDisconnect:
        assert later <= 0
    assert answering.cancelling() == 0


async def test_a_handler_that_the_server_cancels_is_not_one_whose_client_left() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer() -> None:
        async with while_client_waits(receive):
            await asyncio.Event().wait()

    answering = asyncio.ensure_future(answer())
    await turns(5)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_nothing_is_sent_to_a_client_that_left_before_its_answer_was_complete() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    app = create_app(EngineState(ServerConfig(port=0), engine))
    body = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    sent: list[Message] = []

    async def messages() -> AsyncIterator[Message]:
        yield {"type": "http.request", "body": body}
        await until(lambda: engine.running)
        yield {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "state": {}, "root_path": ""}
    await app(scope, messages().__anext__, send)
    assert sent == [] and len(engine.aborted) == 1
