"""The output of one request, for its one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from minisgl.events import Event, joined
from minisgl.parts.experts.host import experts_of
from minisgl.parts.scores.host import scores_of
from minisgl.parts.weights.host import versions_of
from minisgl.request import FinishReason, OutputDelta, Request
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer


@dataclass(eq=False, repr=False)
class OutputStream:
    """The deltas of one request, as an async iterator with one consumer.

    Pending output is merged into one delta, so a slow consumer costs no more memory than the answer
    itself. Ends with the delta that has a finish_reason, or raises the request's error.
    """

    request: Request
    detokenizer: Detokenizer | None
    _abort: Callable[[Request], None]
    text: list[str] = field(default_factory=list)  # not yet delivered
    changed: bool = False  # there is output that the consumer has not seen
    _num_taken: int = 0  # output tokens
    _num_prompt_taken: int = 0  # prompt logprobs
    _waiting: asyncio.Future[None] | None = None  # the consumer, if it waits for output
    _finished: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False

    def abort(self) -> None:
        """End the request unless it has ended. Idempotent."""
        self._abort(self.request)

    def notify(self) -> None:
        """Wake the consumer, unless it has already seen the change."""
        if self.changed and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self.request.finished:
            self._finished.set()

    async def wait_finished(self) -> None:
        """Wait for the end of the request, without being woken for each token.

        Raises the request's error. Output not yet delivered is in `request` and `text`.
        """
        await self._finished.wait()
        if self.request.error is not None:
            raise self.request.error.with_traceback(None)

    async def wait_begun(self) -> None:
        """Wait until there is output that the consumer has not seen, or until the end."""
        if not self.changed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._ended:
            raise StopAsyncIteration
        if not self.changed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.changed = False
        request = self.request
        self._ended = request.finished
        if request.error is not None:
            raise request.error.with_traceback(None)
        return self._take()

    def _take(self) -> OutputDelta:
        request = self.request
        first, first_prompt = self._num_taken, self._num_prompt_taken
        token_ids = request.token_ids[request.num_prompt_tokens + first :]
        self._num_taken += len(token_ids)
        prompt_logprobs = scores_of(request)
        self._num_prompt_taken = len(prompt_logprobs)
        text, self.text = "".join(self.text), []
        stopped_by: str | None = None
        events: Sequence[Event] = ()
        num_reasoning = 0
        if self.detokenizer is not None:
            stopped_by = self.detokenizer.stopped
            if isinstance(self.detokenizer, ParsingDetokenizer):
                events = joined(self.detokenizer.take_events())
                num_reasoning = self.detokenizer.num_reasoning_tokens
        stop_reason: str | int | None = stopped_by
        if request.finish_reason is FinishReason.STOP and stopped_by is None:
            last = request.token_ids[-1]
            stop_reason = last if last in request.stop_token_ids else None  # None: by its matcher
        experts = experts_of(request) if request.finished else None
        return OutputDelta(
            token_ids=token_ids,
            text=text,
            num_output_tokens=self._num_taken,
            num_cached_tokens=request.num_cached_tokens,
            num_host_tokens=request.num_host_tokens,
            num_disk_tokens=request.num_disk_tokens,
            logprobs=request.logprobs[first:],
            prompt_logprobs=prompt_logprobs[first_prompt:],
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
            events=events,
            num_reasoning_tokens=num_reasoning,
            num_drafted_tokens=request.num_drafted_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            routed_experts=b"" if experts is None else experts.tobytes(),
            weight_versions=versions_of(request) if request.finished else (),
        )
