"""The engine: requests in, streams of tokens out, on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine.adapters import LoadedAdapters
from minisgl.engine.answer_plan import AnswerPlan
from minisgl.engine.delivery import Delivery
from minisgl.engine.intake import Intake
from minisgl.engine.loop import StepLoop
from minisgl.engine.shared_pages import SharedPages
from minisgl.engine.startup import Loaded, load, scheduler_of
from minisgl.engine.stats import EngineStats, Meter
from minisgl.engine.stream import OutputStream
from minisgl.engine.vectors import Vectors
from minisgl.engine.weights import Weights
from minisgl.errors import EngineStoppedError, InvalidRequestError, MinisglError
from minisgl.grammar.compiler import Compiled
from minisgl.images.prompt import Prompt
from minisgl.kvcache.disk import STORE_S
from minisgl.request import (
    EVERYONE,
    Extra,
    OutputDelta,
    Request,
    SamplingParams,
    StructuredOutput,
    Tenant,
)
from minisgl.runner.load import Report
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.template_facts import TemplateFacts

SHUTTING_DOWN = "The server is shutting down."
CLOSED = "The engine was closed."


class AsyncEngine:
    """Runs requests. All methods must be called on the event loop that created the engine."""

    def __init__(self, loaded: Loaded[Any]) -> None:
        self.config = loaded.config
        self.capacity = loaded.capacity
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.defaults = loaded.defaults
        self.model_name = loaded.model_name
        self.image_refusal = loaded.images.refusal  # why it takes no images; empty: it does
        self._runner = loaded.runner
        self._process_id = os.getpid()
        self._meter = Meter()
        self._scheduler = scheduler_of(loaded)
        self._intake = Intake(loaded, self._scheduler.parts, self._meter)
        self._delivery = Delivery(self.tokenizer, self._scheduler, self._meter)
        self._steps = StepLoop(loaded, self._scheduler, self._delivery, self._meter)
        self.pages = SharedPages(self._steps.moves, self.submit, self._open_intake)
        self.vectors = Vectors(loaded, self.encode, self.submit)
        self.adapters = LoadedAdapters(
            loaded, self._scheduler, self._delivery, self._open_intake, self._steps.wake
        )
        self.weights = Weights(
            loaded, self._scheduler, self._delivery, self._steps, self._refuse, self._open_intake
        )
        self._ranks = loaded.ranks
        self._refusal: MinisglError | None = None  # why new requests are refused
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig, progress: Report | None = None) -> AsyncEngine:
        """Load the model in a thread and return the running engine. Raises MinisglError.

        If the caller is cancelled, the thread goes on until it next reports progress, or frees
        what it has loaded.
        """
        cancelled = threading.Event()

        def report(phase: str, fraction: float) -> None:
            if cancelled.is_set():
                raise asyncio.CancelledError
            if progress is not None:
                progress(phase, fraction)

        thread = ThreadPoolExecutor(1, "minisgl-load")
        loading = thread.submit(load, config, report)
        try:
            return cls(await asyncio.wrap_future(loading))
        except asyncio.CancelledError:
            cancelled.set()
            loading.add_done_callback(_free_loaded)
            raise
        finally:
            thread.shutdown(wait=loading.done())

    # -- requests ----------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of token ids; a request may use 0 to vocab_size - 1."""
        return self.model.vocab_size

    def warm(self) -> None:
        """Start the processes for conversations, so that the first one does not wait for them."""
        self._intake.warm()

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Tokenize a text.

        Raises ContextLengthError for a text that cannot fit into the context, unless `any_length`
        is set (not every such text is detected here); QueueFullError; EngineStoppedError.
        """
        return await self._open_intake().texts.encode(
            text, add_special_tokens=add_special_tokens, any_length=any_length
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        /,
        **template_options: Any,
    ) -> list[int]:
        """Tokenize a conversation with the model's chat template; raises as `encode` does."""
        return await self._open_intake().texts.chat(messages, any_length, template_options)

    async def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        /,
        **template_options: Any,
    ) -> Prompt:
        """Tokenize a conversation that may have images; raises as `encode` does.

        An image is a part of a message's content: {"type": "image", "source": ImageSource(...)}.
        Clients take turns, and processed images are shared as prefixes are.
        """
        images = self._open_intake().images
        return await images.prompt(messages, any_length, template_options, cache_salt, tenant)

    async def template_facts(self) -> TemplateFacts:
        """What the chat template does with tools and reasoning. Raises EngineStoppedError."""
        return await self._open_intake().texts.template_facts()

    def _open_intake(self) -> Intake:
        """The intake, as long as it takes requests. Raises EngineStoppedError."""
        if os.getpid() != self._process_id:
            raise EngineStoppedError(forked(self._process_id))
        if self.failure is not None:
            raise EngineStoppedError(f"The engine has failed: {self.failure}")
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        return self._intake

    def _refuse(self, reason: MinisglError | None) -> None:
        """Refuse new requests, or take them again, as long as the engine does not stop."""
        if not isinstance(self._refusal, EngineStoppedError):
            self._refusal = reason

    def adapter(self, name: str) -> Extra:
        """What asks for an adapter, among the extras of a request. Raises InvalidRequestError."""
        return self.adapters.named(name)

    async def compile(self, structured: StructuredOutput | None, client: str = "") -> Compiled:
        """Compile a constraint, for the matchers of requests; None constrains only reasoning.

        Clients take turns. Raises InvalidRequestError, which says what is wrong and where;
        QueueFullError; EngineStoppedError.
        """
        return await self._open_intake().compile(structured, client)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        parser: AnswerParser | None = None,
        extras: Sequence[Extra] = (),
    ) -> OutputStream:
        """Queue a request. extras: what it asks of parts besides, each of another class.

        Cached prefixes are shared only between requests of the same client and `cache_salt`.
        `params.structured` needs a `Constraint`, with a matcher from `compile`. With a `parser`,
        which serves this answer alone, deltas have events and stop strings match content only.

        Raises InvalidRequestError, ContextLengthError, QueueFullError or EngineStoppedError.
        """
        intake = self._open_intake()
        request_id = request_id or secrets.token_hex(12)
        if request_id in self._delivery.streams:
            raise InvalidRequestError("request_id", f"{request_id} is running already.")
        request = intake.request(request_id, prompt_token_ids, params, tenant, cache_salt, extras)
        stream = self._delivery.submit(request, parser, self._abort)
        self._steps.wake()
        return stream

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the model cannot serve `params`."""
        self._intake.check(params)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        parser: AnswerParser | None = None,
        lora: str | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Submit a request and yield its deltas. Closing the iterator aborts the request.

        `params.structured` is compiled first; raises as `compile` does. lora: the name of its
        adapter.
        """
        extras: list[Extra] = [] if lora is None else [self.adapter(lora)]
        if params.structured is not None:
            extras += AnswerPlan(grammar=await self.compile(params.structured)).extras()
        stream = self.submit(
            prompt_token_ids,
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            tenant=tenant,
            parser=parser,
            extras=extras,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    def _abort(self, request: Request) -> None:
        if self._delivery.cancel(request):
            self._steps.wake()  # its slot and pages may suffice to admit another request

    # -- failure and the end -----------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """Why the engine is dead; None while it lives."""
        return self._steps.failures.failure

    @property
    def stalled(self) -> str | None:
        """A description of the step that takes much longer than similar ones; None if none does."""
        return self._steps.failures.watch.stalled

    async def drain(self, timeout_s: float, reason: str = SHUTTING_DOWN) -> None:
        """Refuse new requests, wait up to `timeout_s` seconds for the others, end the rest.

        Texts that are being tokenized are waited for too: their requests may still be submitted.
        """
        stopped = EngineStoppedError(reason)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._intake.drain(timeout_s, stopped)
        self._refuse(EngineStoppedError(f"{reason} It takes no more requests."))
        await self._delivery.drain(deadline - loop.time(), stopped)

    async def close(self) -> None:
        """End every request and free the device. Idempotent; concurrent calls wait for it, too."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.drain(0, CLOSED)
            if self._scheduler.kv.of_ranks[0].disk is not None:
                with contextlib.suppress(TimeoutError, MinisglError):
                    await asyncio.wait_for(self._steps.store_all(), STORE_S)
        finally:
            steps_have_ended = await self._steps.end()
            await asyncio.to_thread(self._free, steps_have_ended)

    def _free(self, steps_have_ended: bool) -> None:
        # Closing a single rank blocks while a step hangs; several ranks handle that in `close`.
        if self._ranks is not None or steps_have_ended:
            self._runner.close()
        self._intake.join()

    def abandon(self) -> None:
        """Free the device after the event loop has stopped. Waiting callers are not notified.

        Blocks until the steps in flight have ended or timed out. Any thread may call it.
        """
        if self._closing is not None:
            return
        self._intake.abandon()
        self._free(self._steps.abandon(self.config.step_timeout))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stats(self) -> EngineStats:
        kv, speculation = self._scheduler.kv, self._scheduler.speculation
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_queued=self._scheduler.num_waiting,
            num_pages=kv.num_pages - 1,
            num_free_pages=kv.num_free,
            num_cached_pages=kv.num_cached,
            host=self._steps.moves.host_stats(),
            transfers=self._steps.moves.transfer_stats(),
            snapshots=kv.snapshot_stats(),
            drafts=None if speculation is None else replace(speculation.counters),
            counters=replace(self._scheduler.counters),
            totals=deepcopy(self._meter.totals),
        )

    def audit(self) -> None:
        """Recompute the invariants of scheduler and KV cache; AssertionError if one fails."""
        self._scheduler.audit()


def forked(process_id: int) -> str:
    return (
        f"The model was loaded by process {process_id}, of which this one is a fork: a fork has "
        "neither its threads nor its device. Load it here, or start processes by spawn."
    )


def _free_loaded(loading: Future[Loaded[Any]]) -> None:
    """Free what was loaded for a caller that has gone."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().runner.close()
