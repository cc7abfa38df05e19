"""The engine: requests in, streams of tokens out, on the caller's event loop.

Each finished step costs the loop one callback: settle it, plan and launch the next one, and only
then hand out the tokens. So the device has its next step queued while everything else happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from minisgl.config import (
    Capacity,
    EngineConfig,
    ModelFacts,
    ResolvedConfig,
    overlap_enabled,
    resolve,
)
from minisgl.detokenizer import Detokenizer
from minisgl.errors import (
    ContextLengthError,
    EngineStoppedError,
    HostMemoryError,
    InvalidRequestError,
    MinisglError,
    StepError,
    without_words,
)
from minisgl.fanout import Fanout
from minisgl.intake import Intake
from minisgl.kvcache.manager import KVCacheManager
from minisgl.models.config import read_model_config
from minisgl.models.generation import GenerationDefaults, read_generation_defaults
from minisgl.models.hub import locate_model
from minisgl.request import (
    EVERYONE,
    MAX_EDITS,
    FinishReason,
    OutputDelta,
    Request,
    RequestStatus,
    SamplingParams,
    Tenant,
    check_token_ids,
)
from minisgl.runner.facts import device_facts
from minisgl.runner.load import load_runner
from minisgl.runner.parallel.tensor_parallel import TensorParallelRunner, load_ranks
from minisgl.runner.runner import ModelRunner
from minisgl.runner.step_watch import FIRST_LIMIT_S, LOOK_S, StepWatch
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler, Settled
from minisgl.stats import EngineStats, Meter
from minisgl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "The host ran out of memory while a step was planned; give the server more, or lower "
    "--max-running-requests and --max-queued-requests."
)
SHUTTING_DOWN = "The server is shutting down."
CLOSED = "The engine was closed."
# At the end nobody waits longer for a rank that gives no sign of life.
CLOSE_GRACE_S = 5.0

Handle = TypeVar("Handle")
# Called with the phase and, where it can be counted, its share done (0 to 1).
LoadProgress = Callable[[str, float], None]


class Runner(Protocol[Handle]):
    """What executes plans: one rank, several, or a fake one in tests."""

    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step and return at once. Called on the event loop."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Block until the step is done. Called on the engine's own thread, in launch order."""
        ...

    def may_compile(self) -> bool:
        """Whether a launched step may be compiling kernels, which takes its time."""
        ...

    def close(self) -> None: ...


class Ranks(Protocol):
    """The part of a runner on several ranks that knows of the others."""

    @property
    def lost(self) -> Future[None]:
        """Raises when no step will end any more, where `collect` may not."""
        ...

    def silence(self) -> Mapping[int, float]:
        """Seconds since the last sign of life, by rank."""
        ...

    def give_up(self, reason: MinisglError) -> None:
        """Kill the others, and let `lost` raise. Returns at once."""
        ...


class OutputStream:
    """The deltas of one request, as an async iterator with one consumer.

    What the consumer has not taken yet is merged into one delta, so a slow one costs no more
    memory than the answer itself. Ends with the delta that has a finish_reason, or raises the
    request's error.
    """

    def __init__(
        self, request: Request, detokenizer: Detokenizer | None, abort: Callable[[Request], None]
    ) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.text: list[str] = []  # not taken yet
        self._num_taken = 0  # output tokens
        self._num_prompt_taken = 0  # prompt logprobs
        self.changed = False  # since the consumer looked
        self._waiting: asyncio.Future[None] | None = None  # the consumer, for a change
        self._finished = asyncio.Event()
        self._ended = False
        self._abort = abort

    @property
    def request_id(self) -> str:
        return self.request.id

    def abort(self) -> None:
        """End the request now if it has not ended. Idempotent."""
        self._abort(self.request)

    def notify(self) -> None:
        """Wake the consumer, unless it has seen already what changed."""
        if self.changed and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self.request.finished:
            self._finished.set()

    async def wait_finished(self) -> None:
        """Wait for the end alone, which wakes the caller once and not for every token.

        Raises the request's error. What was not taken is in `request` and `text`.
        """
        await self._finished.wait()
        if self.request.error is not None:
            raise self.request.error.with_traceback(None)

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
        self._num_prompt_taken = len(request.prompt_logprobs)
        text, self.text = "".join(self.text), []
        stopped_by = self.detokenizer.stopped if self.detokenizer else None
        stop_reason: str | int | None = stopped_by
        if request.finish_reason is FinishReason.STOP and stopped_by is None:
            stop_reason = request.token_ids[-1]
        return OutputDelta(
            token_ids=token_ids,
            text=text,
            num_output_tokens=self._num_taken,
            num_cached_tokens=request.num_cached_tokens,
            logprobs=request.logprobs[first:],
            prompt_logprobs=request.prompt_logprobs[first_prompt:],
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
        )


class _Collector(Generic[Handle]):
    """The thread that waits for steps, so that the loop never does."""

    def __init__(
        self, runner: Runner[Handle], done: Callable[[int, StepResult | Exception], None]
    ) -> None:
        self._runner = runner
        self._done = done
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._handles: queue.SimpleQueue[tuple[int, Handle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name="minisgl-collector", daemon=True)
        self._thread.start()

    def add(self, step: int, handle: Handle) -> None:
        self._handles.put((step, handle))

    def end(self) -> None:
        """Nothing more is added. `ended` is done when everything is collected."""
        self._handles.put(None)

    def join(self, timeout_s: float) -> bool:
        """Block after `end` until everything is collected, where no loop runs that `ended` could
        tell; False if it is not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _collect(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without closing the engine
            while (item := self._handles.get()) is not None:
                step, handle = item
                try:
                    outcome: StepResult | Exception = self._runner.collect(handle)
                except Exception as error:
                    outcome = error
                del handle, item
                self._loop.call_soon_threadsafe(self._done, step, outcome)
            self._loop.call_soon_threadsafe(self.ended.set_result, None)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Handle]):
    """Everything that start-up brings together."""

    runner: Runner[Handle]
    config: ResolvedConfig
    capacity: Capacity
    model: ModelFacts
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    model_name: str
    ranks: Ranks | None = None  # where there are several


def load(config: EngineConfig, progress: LoadProgress | None = None) -> Loaded[Any]:
    """Locate, read and load the model. Blocks. Raises MinisglError."""
    report = progress or (lambda phase, share: None)
    started = time.monotonic()
    folder = locate_model(config.model, load_format=config.load_format)
    name = config.model or folder.name
    model_config = read_model_config(folder)
    facts = model_config.facts()
    # What cannot be divided is refused by resolve.
    on_rank = facts.on_rank(config.tp) if facts.can_divide(config.tp) else facts
    resolved = resolve(config, facts, device_facts(on_rank), overlap=overlap_enabled())
    tokenizer = None
    if Tokenizer.found_in(folder) or config.load_format != "dummy":
        tokenizer = Tokenizer.load(folder)
    defaults = read_generation_defaults(folder, tokenizer.eos_token_id if tokenizer else None)
    runner: ModelRunner | TensorParallelRunner
    ranks: Ranks | None = None
    if resolved.tp == 1:
        runner = load_runner(resolved, model_config, folder, report)
    else:
        runner = ranks = load_ranks(resolved, model_config, folder, report)
    for note in (*model_config.notes, *resolved.notes):
        logger.info("%s", note)
    if defaults.values:
        chosen = ", ".join(f"{name} {value}" for name, value in defaults.values.items())
        logger.info("The checkpoint's sampling defaults: %s", chosen)
    capacity = runner.capacity
    logger.info(
        "Loaded %s in %.1f s: %s on %s, KV cache of %d tokens in pages of %d, context %d%s",
        name,
        time.monotonic() - started,
        resolved.dtype,
        resolved.device,
        (capacity.num_pages - 1) * capacity.page_size,
        capacity.page_size,
        capacity.max_seq_len,
        "" if resolved.device == "cpu" else f", CUDA graphs up to batch {capacity.max_graph_batch}",
    )
    if capacity.max_graph_batch < resolved.cuda_graph_max_bs:
        logger.warning(
            "No memory for CUDA graphs of batches over %d: larger ones run without; lower "
            "--memory-ratio or --cuda-graph-max-bs.",
            capacity.max_graph_batch,
        )
    if capacity.max_seq_len < resolved.max_seq_len:
        logger.warning(
            "The longest sequence is capped at the KV cache: %d tokens instead of %d",
            capacity.max_seq_len,
            resolved.max_seq_len,
        )
    return Loaded(runner, resolved, capacity, facts, tokenizer, defaults, name, ranks)


class AsyncEngine:
    """Runs requests. Every method is called on the event loop that the engine was made on."""

    def __init__(self, loaded: Loaded[Any]) -> None:
        self.config = loaded.config
        self.capacity = loaded.capacity
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.defaults = loaded.defaults
        self.model_name = loaded.model_name
        self.failure: BaseException | None = None  # why the engine is dead
        self._runner = loaded.runner
        self._scheduler = Scheduler(
            kv=KVCacheManager(
                num_pages=self.capacity.num_pages,
                page_size=self.capacity.page_size,
                cache_type=self.config.cache_type,
            ),
            num_slots=self.capacity.num_slots,
            max_seq_len=self.capacity.max_seq_len,
            max_prefill_length=self.config.max_prefill_length,
            max_queued_requests=self.config.max_queued_requests,
            policy=self.config.schedule_policy,
            conservativeness=self.config.schedule_conservativeness,
        )
        # One step beyond the running one is launched, so that the device never waits for the loop.
        self._max_in_flight = 2 if self.config.overlap else 1
        self._streams: dict[str, OutputStream] = {}
        self._intake: Intake | None = None
        if self.tokenizer is not None:
            self._intake = Intake(
                self.tokenizer,
                max_seq_len=self.capacity.max_seq_len,
                num_places=self.config.max_running_requests + self.config.max_queued_requests,
            )
        self._meter = Meter()
        self._pump_is_due = False
        self._refusal: str | None = None  # why no new work is taken
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._process_id = os.getpid()
        self._collector = _Collector(self._runner, self._on_step)
        self._fanout = Fanout(self._loop)
        self._closing: asyncio.Future[None] | None = None
        self._ranks = loaded.ranks
        first_limit_s = math.inf if self._ranks is None else FIRST_LIMIT_S
        self._watch = StepWatch(self.config.step_timeout, first_limit_s=first_limit_s)
        self._looking: asyncio.TimerHandle | None = None
        self._hung: asyncio.Future[None] = self._loop.create_future()  # done: steps may never end
        if self._ranks is not None:
            self._ranks.lost.add_done_callback(self._on_lost)

    @classmethod
    async def start(cls, config: EngineConfig, progress: LoadProgress | None = None) -> AsyncEngine:
        """Load the model in a thread and return the running engine. Raises MinisglError.

        A thread cannot be cancelled with its caller; it ends where it has progress to report next.
        """
        cancelled = threading.Event()

        def report(phase: str, share: float) -> None:
            if cancelled.is_set():
                raise asyncio.CancelledError
            if progress is not None:
                progress(phase, share)

        try:
            return cls(await asyncio.to_thread(load, config, report))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    # -- requests ----------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Token ids that requests may use are below."""
        return self.model.vocab_size

    def warm(self) -> None:
        """Get ready for conversations, which takes a second that the first one would wait."""
        if self._intake is not None and self.tokenizer and self.tokenizer.has_chat_template:
            self._intake.warm()

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Raises ContextLengthError where the text is seen to have too many before it is tokenized,
        unless `any_length` says that they need not fit; QueueFullError and EngineStoppedError.
        """
        return await self._open_intake().encode(
            text, add_special_tokens=add_special_tokens, any_length=any_length
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        /,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template; raises as `encode` does."""
        return await self._open_intake().chat(messages, any_length, template_options)

    def _open_intake(self) -> Intake:
        self._check_open()
        if self._intake is None:
            raise InvalidRequestError("prompt", "the model has no tokenizer; send token ids.")
        return self._intake

    def _check_open(self) -> None:
        if os.getpid() != self._process_id:
            raise EngineStoppedError(forked(self._process_id))
        if self._refusal is not None:
            raise EngineStoppedError(self._refusal)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> OutputStream:
        """Queue a request.

        It shares cached prefixes with the requests of the same client and `cache_salt` alone.
        Raises InvalidRequestError, ContextLengthError, QueueFullError or EngineStoppedError.
        """
        self._check_open()
        request = self._make_request(prompt_token_ids, params, request_id, cache_salt, tenant)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop=params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                prompt_token_ids=prompt_token_ids,
            )
        stream = OutputStream(request, detokenizer, self._abort)
        self._scheduler.submit(request)
        self._streams[request.id] = stream
        self._idle.clear()
        self._pump_soon()
        return stream

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError where they ask for what this model does not have."""
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop", "the model has no tokenizer to match strings with.")
        check_token_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        check_token_ids("logit_bias", params.logit_bias.keys(), self.vocab_size)

    def _make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        cache_salt: str | None,
        tenant: Tenant,
    ) -> Request:
        request_id = request_id or secrets.token_hex(12)
        if request_id in self._streams:
            raise InvalidRequestError("request_id", f"{request_id} is running already.")
        check_token_ids("prompt", prompt, self.vocab_size)
        self.check(params)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self.capacity.max_seq_len - len(prompt)
            if max_tokens < 1:
                raise ContextLengthError(len(prompt), None, self.capacity.max_seq_len)
        request = Request(
            request_id,
            prompt,
            params,
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_token_ids=self.defaults.eos_token_ids,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        if len(params.logit_bias) + len(request.stop_token_ids) > MAX_EDITS:
            raise InvalidRequestError(
                "logit_bias", f"with stop tokens and EOS at most {MAX_EDITS} entries are allowed."
            )
        return request

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> AsyncIterator[OutputDelta]:
        """The deltas of one request. Closing the iterator aborts it."""
        stream = self.submit(
            prompt_token_ids, params, request_id=request_id, cache_salt=cache_salt, tenant=tenant
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    def _abort(self, request: Request) -> None:
        if self._scheduler.cancel(request):
            self._end_stream(request)
            self._pump_soon()  # its slot and pages may let another request in

    # -- the loop ----------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Plan once what this turn of the loop brings, instead of a step for the first request."""
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Launch steps until enough are in flight."""
        self._pump_is_due = False
        try:
            self._launch_steps()
        except Exception as error:
            self._die(error)

    def _on_step(self, step: int, outcome: StepResult | Exception) -> None:
        """A step is done, for better or worse. Called once for each, in order."""
        self._watch.ended()
        if step != self._scheduler.next_to_settle:
            return  # lost with a failed step before it
        try:
            if isinstance(outcome, Exception):
                self._fail_step(step, outcome)
                self._launch_steps()
            else:
                now = time.monotonic()
                self._meter.step_ended(now, captured=outcome.captured)
                settled = self._scheduler.settle(outcome)
                self._launch_steps()
                self._meter.tokens_came(settled.progressed, now)
                self._hand_out(settled)
        except Exception as error:
            self._die(error)

    def _launch_steps(self) -> None:
        while self.failure is None and self._scheduler.num_in_flight < self._max_in_flight:
            plan = self._scheduler.plan()
            if plan is None:
                return
            if self._scheduler.num_in_flight == 1:
                self._meter.step_began(time.monotonic())
            try:
                handle = self._runner.launch(plan)
            except Exception as error:
                self._fail_step(plan.step, error)
            else:
                self._collector.add(plan.step, handle)
                self._watch.began(plan)
                if self._looking is None:
                    self._look_later()

    def _hand_out(self, settled: Settled) -> None:
        for request in settled.progressed:
            stream = self._streams.get(request.id)
            if stream is None:
                continue  # the step launched after it has failed already
            if stream.detokenizer is not None:
                try:
                    self._detokenize(request, stream, stream.detokenizer)
                except MemoryError:
                    self._run_short(request)
                    continue
            if request.finished:
                self._end_stream(request)
            else:
                self._tell(stream)
        for request in settled.finished:
            if request.id in self._streams:  # ended without a token
                self._end_stream(request)

    def _detokenize(self, request: Request, stream: OutputStream, detokenizer: Detokenizer) -> None:
        token_id = request.token_ids[-1]
        if not (request.finished and token_id in request.stop_token_ids):
            stream.text.append(detokenizer.push(token_id))
            if detokenizer.stopped is not None:
                self._scheduler.finish(request, request.num_output_tokens)
        if request.finished:
            stream.text.append(detokenizer.flush())

    def _run_short(self, request: Request) -> None:
        """No memory is left for the text of one request; the others may go on."""
        error = HostMemoryError()
        logger.error("request %s: %s", request.id, error)
        if not self._scheduler.cancel(request, error):  # its last token has ended it
            request.finish_reason, request.error = FinishReason.ERROR, error
        self._end_stream(request)

    def _end_stream(self, request: Request) -> None:
        self._tell(self._streams.pop(request.id))
        now = time.monotonic()
        self._meter.request_ended(request, now)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", _ending(request, now))
        if not self._streams:
            self._idle.set()

    def _tell(self, stream: OutputStream) -> None:
        stream.changed = True
        self._fanout.add(stream)

    # -- failure and the end -----------------------------------------------------------------------

    def _fail_step(self, step: int, error: Exception) -> None:
        if isinstance(error, EngineStoppedError):
            self._die(error)
            return
        if isinstance(error, MemoryError):
            error = HostMemoryError()
        elif not isinstance(error, StepError):
            error = StepError(f"Step {step} failed: {type(error).__name__}: {error}")
        logger.error("%s", error, exc_info=error.__cause__)
        for request in self._scheduler.fail(step, error):
            self._end_stream(request)

    def _die(self, error: Exception) -> None:
        """Nothing can run any more: every waiter gets the reason."""
        if self.failure is not None:
            return
        reason = error
        if isinstance(error, MinisglError):
            logger.critical("The engine has failed: %s", error, exc_info=error)
        else:
            logger.critical("The engine has failed: %s", without_words(error))
            reason = EngineStoppedError(
                OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
            )
        self.failure = reason
        self._refusal = f"The engine has failed: {reason}"
        # The scheduler's books may be what is broken: every waiter is told without them.
        for stream in list(self._streams.values()):
            stream.request.status = RequestStatus.FINISHED
            stream.request.finish_reason = FinishReason.ERROR
            stream.request.error = reason
            self._end_stream(stream.request)

    @property
    def stalled(self) -> str | None:
        """What is the matter, while a step takes much longer than ones like it."""
        return self._watch.stalled

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Runs every second while a step is in flight."""
        self._looking = None
        reason = self._watch.look(
            time.monotonic(),
            compiles=self._runner.may_compile(),
            silence=self._ranks.silence() if self._ranks is not None else {},
        )
        if reason is not None:
            self._give_up(EngineStoppedError(reason))
        elif self._watch.in_flight and self.failure is None:
            self._look_later()

    def _give_up(self, reason: EngineStoppedError) -> None:
        """The steps in flight will not end."""
        if self._ranks is not None:
            self._ranks.give_up(reason)
        else:
            self._on_hung(reason)

    def _on_lost(self, lost: Future[None]) -> None:
        """Called by any thread."""
        reason = lost.exception()
        if isinstance(reason, Exception):
            with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
                self._loop.call_soon_threadsafe(self._on_hung, reason)

    def _on_hung(self, reason: Exception) -> None:
        self._die(reason)
        if not self._hung.done():
            self._hung.set_result(None)

    async def drain(self, timeout_s: float, reason: str = SHUTTING_DOWN) -> None:
        """Refuse new requests, wait up to `timeout_s` seconds for the others, end the rest.

        A text that is being tokenized belongs to the others: it may still be submitted.
        """
        stopped = EngineStoppedError(reason)
        deadline = self._loop.time() + timeout_s
        if self._intake is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._intake.settle(), timeout_s)
            self._intake.close(stopped)
        self._refusal = self._refusal or f"{reason} It takes no more requests."
        try:
            await asyncio.wait_for(self._idle.wait(), deadline - self._loop.time())
        except TimeoutError:
            for stream in list(self._streams.values()):
                if self._scheduler.cancel(stream.request, stopped):
                    self._end_stream(stream.request)

    async def close(self) -> None:
        """End every request and free the device. Idempotent; whoever calls waits for the end."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.drain(0, CLOSED)
        finally:
            self._max_in_flight = 0
            self._collector.end()
            await self._steps_end()
            await asyncio.to_thread(self._free, self._collector.ended.done())

    def _free(self, steps_have_ended: bool) -> None:
        # One rank whose steps do not end cannot be closed either; several see to it themselves.
        if self._ranks is not None or steps_have_ended:
            self._runner.close()
        if self._intake is not None:
            self._intake.join()

    def abandon(self) -> None:
        """Free the device when the loop has been stopped for good. Whoever waits is told nothing.

        Blocks until the steps in flight have ended, or take too long. Called by any thread.
        """
        if self._closing is not None:
            return
        if self._intake is not None:
            self._intake.end()
        self._collector.end()
        self._free(self._collector.join(self.config.step_timeout))

    async def _steps_end(self) -> None:
        """Wait for what is launched until it has ended or is known to hang."""
        ending = (self._collector.ended, self._hung)
        while not any(future.done() for future in ending):
            await asyncio.wait(ending, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if self._ranks is not None:
                silent = [r for r, s in self._ranks.silence().items() if s > CLOSE_GRACE_S]
                if silent:
                    stopped = f"Rank {silent[0]} is silent, and does not end its last step."
                    self._ranks.give_up(EngineStoppedError(stopped))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stats(self) -> EngineStats:
        kv = self._scheduler.kv
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_queued=self._scheduler.num_waiting,
            num_pages=kv.num_pages - 1,
            num_free_pages=kv.num_free,
            num_cached_pages=kv.num_cached,
            counters=replace(self._scheduler.counters),
            totals=self._meter.totals.copy(),
        )

    def audit(self) -> None:
        """Recompute the invariants of scheduler and KV cache; AssertionError if one fails."""
        self._scheduler.audit()


def forked(process_id: int) -> str:
    return (
        f"The model was loaded by process {process_id}, of which this one is a fork: a fork has "
        "neither its threads nor its device. Load it here, or start processes by spawn."
    )


def _ending(request: Request, now: float) -> str:
    """A line for the log: counts and times, and nothing of what was said."""
    assert request.finish_reason is not None
    first = request.first_token_s
    return (
        f"request {request.id}: {request.finish_reason.value} after "
        f"{now - request.submitted_s:.3f} s, {request.num_prompt_tokens} prompt tokens "
        f"({request.num_cached_tokens} cached), {request.num_output_tokens} output tokens"
        + ("" if first is None else f" from {first - request.submitted_s:.3f} s on")
    )
