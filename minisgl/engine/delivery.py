"""The way of tokens to their consumers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from minisgl.engine.fanout import Fanout
from minisgl.engine.stats import Meter
from minisgl.engine.stream import OutputStream
from minisgl.errors import HostMemoryError, MinisglError
from minisgl.request import FinishReason, Request, RequestStatus
from minisgl.scheduler.launched import Settled
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer
from minisgl.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Delivery:
    """The streams of all open requests: each ends here, once. Used on the engine's loop."""

    def __init__(self, tokenizer: Tokenizer | None, scheduler: Scheduler, meter: Meter) -> None:
        self.streams: dict[str, OutputStream] = {}  # by request id
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._meter = meter
        self._fanout = Fanout(asyncio.get_running_loop())
        self._idle = asyncio.Event()  # there are no streams
        self._idle.set()

    def submit(
        self, request: Request, parser: AnswerParser | None, abort: Callable[[Request], None]
    ) -> OutputStream:
        """Queue a request; returns the stream of its output. Raises as `Scheduler.submit` does."""
        detokenizer = None
        if self._tokenizer is not None and request.max_tokens:
            params = request.params
            make = Detokenizer if parser is None else partial(ParsingDetokenizer, parser=parser)
            detokenizer = make(
                self._tokenizer,
                stop=params.stop,
                include_stop=params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                prompt_token_ids=request.token_ids,
            )
        stream = OutputStream(request, detokenizer, abort)
        self._scheduler.submit(request)
        self.streams[request.id] = stream
        self._idle.clear()
        return stream

    def hand_out(self, settled: Settled, now: float) -> None:
        """Deliver the tokens of a step, and end the streams of the requests that it has ended."""
        finished: list[Request] = []
        for index, request in enumerate(settled.progressed):
            stream = self.streams.get(request.id)
            if stream is None:
                continue  # ended by the failure of the step launched after this one
            if stream.detokenizer is not None:
                num_tokens = settled.num_tokens[index]
                try:
                    dropped = self._detokenize(request, stream, stream.detokenizer, num_tokens)
                except MemoryError:
                    self._run_short(request)
                else:
                    settled.num_tokens[index] -= dropped
            if request.finished:
                finished.append(request)
            else:
                self._tell(stream)
        self._meter.tokens_came(settled.progressed, settled.num_tokens, now)
        for request in (*finished, *settled.finished):
            if request.id in self.streams:
                self.end(request)

    def _detokenize(
        self, request: Request, stream: OutputStream, detokenizer: Detokenizer, num_tokens: int
    ) -> int:
        """Detokenize the new tokens; returns the number of those after the end of a stop string."""
        token_ids = request.token_ids
        end = len(token_ids)
        natural = False
        if request.finished and token_ids[-1] in request.stop_token_ids:
            end -= 1  # EOS or a stop token is not part of the text
            natural = True
        dropped = 0
        for index in range(len(token_ids) - num_tokens, end):
            stream.text.append(detokenizer.push(token_ids[index]))
            if detokenizer.stopped is not None:
                dropped = len(token_ids) - index - 1
                break
        if request.finished:
            stream.text.append(detokenizer.flush(natural=natural))
        if detokenizer.stopped is not None:  # perhaps in what was held back until now
            self._scheduler.finish(request, request.num_output_tokens - dropped)
        return dropped

    def _run_short(self, request: Request) -> None:
        """Fail one request because its text does not fit into memory; the others go on."""
        error = HostMemoryError()
        logger.error("request %s: %s", request.id, error)
        if not self._scheduler.cancel(request, error):  # already ended by its last token
            request.finish_reason, request.error = FinishReason.ERROR, error

    def cancel(self, request: Request, error: MinisglError | None = None) -> bool:
        """End a request at once, with its stream. False if it had already ended."""
        if not self._scheduler.cancel(request, error):
            return False
        self.end(request)
        return True

    def end(self, request: Request) -> None:
        """End the stream of a request that the scheduler has ended."""
        self._tell(self.streams.pop(request.id))
        now = time.monotonic()
        self._meter.request_ended(request, now)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", _ending(request, now))
        if not self.streams:
            self._idle.set()

    def _tell(self, stream: OutputStream) -> None:
        stream.changed = True
        self._fanout.add(stream)

    async def drain(self, timeout_s: float, error: MinisglError) -> None:
        """Wait until all requests have ended; those that have not in time end with `error`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        for stream in list(self.streams.values()):
            self.cancel(stream.request, error)

    def fail_all(self, reason: BaseException) -> None:
        """End every request without using the scheduler, whose state may be corrupt."""
        for stream in list(self.streams.values()):
            stream.request.status = RequestStatus.FINISHED
            stream.request.finish_reason = FinishReason.ERROR
            stream.request.error = reason
            self.end(stream.request)


def _ending(request: Request, now: float) -> str:
    """A log line with the counts and times of a finished request, without any of its text."""
    assert request.finish_reason is not None
    first = request.first_token_s
    cached = f"{request.num_cached_tokens} cached"
    if request.num_host_tokens:
        cached += f", {request.num_host_tokens} of them from host memory"
    if request.num_disk_tokens:
        cached += f", {request.num_disk_tokens} of them from disk"
    drafted = f", {request.num_accepted_tokens} of {request.num_drafted_tokens} drafts accepted"
    return (
        f"request {request.id}: {request.finish_reason.value} after "
        f"{now - request.submitted_s:.3f} s, {request.num_prompt_tokens} prompt tokens "
        f"({cached}), {request.num_output_tokens} output tokens"
        + (drafted if request.num_drafted_tokens else "")
        + ("" if first is None else f" from {first - request.submitted_s:.3f} s on")
    )
