"""ASGI responses that generate on the engine, and abort their requests however they end.

The abort is in the `finally` of the response itself: a client that disconnects while an event is
being sent would not close an async generator, so a `finally` there would run only at garbage
collection.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from starlette.types import Receive, Scope, Send

from minisgl.engine.stream import OutputStream
from minisgl.engine.turns import Turn
from minisgl.errors import ContextLengthError, EngineStoppedError
from minisgl.server.answers.reply import Reply, ReplyChoice
from minisgl.server.http.access_log import BEGAN, note, note_failure
from minisgl.server.http.deadlines import limit_of
from minisgl.server.http.leaving import until_left
from minisgl.server.http.tracing import span_of

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine import AsyncEngine

# From this many tokens on, logprobs are encoded in a thread: some 10 µs each with 20 alternatives.
MANY_SCORED = 256


class ReplyResponse(ABC):
    """An ASGI response that generates the choices of `reply`."""

    def __init__(
        self,
        engine: AsyncEngine,
        reply: Reply,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """headers: besides the usual ones."""
        self._engine = engine
        self._reply = reply
        self._headers = headers
        self._left = False  # whether the client disconnected before its answer was complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams: list[OutputStream] = []
        self._scope = scope
        watching: asyncio.Task[None] | None = None
        try:
            # Submit everything before the first byte, so that a rejection has its own status.
            turn = Turn()
            for choice in self._reply.choices:
                job = choice.job
                id = f"{self._reply.id}-{job.index}"
                stream = self._engine.submit(
                    job.submitted,
                    job.params,
                    request_id=id,
                    cache_salt=job.cache_salt,
                    tenant=job.tenant,
                    parser=job.parser,
                    extras=(*job.extras, *job.prompt_extras),
                )
                streams.append(stream)
                await turn.share()
            watching = asyncio.ensure_future(self._abort_on_disconnect(receive, streams))
            await self._respond(streams, send)
        except ContextLengthError as error:
            reply = self._reply
            raise error.with_names(
                prompt_field=reply.prompt_field, limit_field=reply.limit_field
            ) from None
        except EngineStoppedError:
            if not self._left:  # otherwise the client is gone
                raise
        finally:
            if watching is not None:
                watching.cancel()
            for stream in streams:
                stream.abort()
            if streams:
                self._note_work(streams)

    def _note_work(self, streams: Sequence[OutputStream]) -> None:
        """Say in the log how many tokens were read and written, and how long it waited for them."""
        choices, scope = self._reply.choices, self._scope
        if (span := span_of(scope)) is not None:
            span.worked(self._reply.id, [stream.request for stream in streams])
        firsts = [choice for choice in choices if choice.job.k == 0]  # a prompt counts once
        note(
            scope,
            prompt_tokens=sum(len(choice.job.prompt_token_ids) for choice in firsts),
            cached_tokens=sum(choice.last.num_cached_tokens for choice in firsts),
            output_tokens=sum(choice.last.num_output_tokens for choice in choices),
        )
        requests = [stream.request for stream in streams]
        if waited := [r.admitted_s - r.submitted_s for r in requests if r.admitted_s is not None]:
            note(scope, queue_s=round(max(waited), 4))
        if came := [r.first_token_s for r in requests if r.first_token_s is not None]:
            note(scope, first_token_s=round(min(came) - scope["state"][BEGAN], 4))

    async def _abort_on_disconnect(self, receive: Receive, streams: Sequence[OutputStream]) -> None:
        """Abort the requests when the client disconnects, which ends their streams."""
        await until_left(receive)
        self._left = True
        for stream in streams:
            stream.abort()

    @abstractmethod
    async def _respond(self, streams: Sequence[OutputStream], send: Send) -> None: ...


class WholeResponse(ReplyResponse):
    """One JSON object, sent when all choices are complete."""

    async def _respond(self, streams: Sequence[OutputStream], send: Send) -> None:
        choices, limit = self._reply.choices, limit_of(self._scope)
        async with limit.held():
            limit.watch(streams[0].request)
            await _all_or_none(map(_keep, choices, streams))
        if self._left:
            return  # what there is of an aborted answer is for trainers
        many = sum(choice.num_scored for choice in choices) > MANY_SCORED
        body = await asyncio.to_thread(self._reply.whole) if many else self._reply.whole()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamedResponse(ReplyResponse):
    """Server-sent events, one for each delta."""

    HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx then forwards events without buffering
    )

    waits: ClassVar[bool] = True  # for the first token, if the request has a limit

    async def _respond(self, streams: Sequence[OutputStream], send: Send) -> None:
        limit = limit_of(self._scope)
        if limit.is_set and self.waits:  # what is late before its first token is told by the status
            async with limit.held():
                limit.watch(streams[0].request)
                await streams[0].wait_begun()
        headers = [*self.HEADERS, *self._headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with limit.held():
                if not self.waits:
                    limit.watch(streams[0].request)
                if first := self._reply.first_events():
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                choices = self._reply.choices
                await _all_or_none(map(_write, choices, streams, [send] * len(choices)))
            last = self._reply.last_events()
        except Exception as error:
            if self._left:
                raise
            for stream in streams:  # before the client may keep this from going on
                stream.abort()
            # The status has been sent, so the error is an event.
            note_failure(self._scope, error)
            last = self._reply.failure_events(error)
        await send({"type": "http.response.body", "body": last})


class BackgroundEvents(StreamedResponse):
    """Those of an answer that is asked for later, where its failure is told, too."""

    waits = False


async def _keep(choice: ReplyChoice, stream: OutputStream) -> None:
    async for delta in stream:
        choice.keep(delta)
    choice.check_finished()


async def _write(choice: ReplyChoice, stream: OutputStream, send: Send) -> None:
    async for delta in stream:
        many = len(delta.prompt_logprobs) + len(delta.logprobs) > MANY_SCORED
        events = await asyncio.to_thread(choice.events, delta) if many else choice.events(delta)
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
    choice.check_finished()


async def _all_or_none(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all concurrently. The first failure cancels the others and is raised."""
    # Use tasks even for one: waking this coroutine goes through a dozen coroutines of frameworks.
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
