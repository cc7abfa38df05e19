"""The engine: requests in, streams of tokens out, on the caller's event loop.

A finished step is handled in one callback of the loop: settle it, plan and launch the next step,
and only then hand out the tokens. Detokenization and delivery so overlap with the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from minisgl.config import EngineConfig
from minisgl.engine.collector import Collector
from minisgl.engine.fanout import Fanout
from minisgl.engine.intake import Intake
from minisgl.engine.landings import Landings
from minisgl.engine.masks import Failures, MaskFiller
from minisgl.engine.startup import Loaded, load
from minisgl.engine.stats import EngineStats, HostStats, Meter
from minisgl.engine.stream import OutputStream
from minisgl.engine.token_rules import TokenRules, mask_of, word_token_ids
from minisgl.engine.transfers import Sharing, Transfers
from minisgl.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    HostMemoryError,
    InvalidRequestError,
    MinisglError,
    StepError,
    without_words,
)
from minisgl.grammar.compiler import Compiled, Grammars
from minisgl.kvcache.copies import HostTraffic
from minisgl.kvcache.manager import KVCacheManager
from minisgl.matcher import MaskRows, Matcher
from minisgl.request import (
    EVERYONE,
    MAX_EDITS,
    NOT_BESIDE_A_CONSTRAINT,
    FinishReason,
    OutputDelta,
    Request,
    RequestStatus,
    SamplingParams,
    StructuredOutput,
    Tenant,
    cache_namespace,
    check_token_ids,
)
from minisgl.runner.load import Report
from minisgl.runner.page_wire import check_address
from minisgl.runner.step_watch import FIRST_LIMIT_S, LOOK_S, StepWatch
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler, Settled
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.detokenizer import ParsingDetokenizer
from minisgl.text.template_facts import TemplateFacts

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "The host ran out of memory while a step was planned; give the server more, or lower "
    "--max-running-requests and --max-queued-requests."
)
SHUTTING_DOWN = "The server is shutting down."
CLOSED = "The engine was closed."
# Closing the engine waits no longer than this for a rank that has stopped sending heartbeats.
CLOSE_GRACE_S = 5.0
# Closing the engine writes to a disk cache for no longer than this.
STORE_S = 10.0


class AsyncEngine:
    """Runs requests. All methods must be called on the event loop that created the engine."""

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
                num_host_pages=self.config.num_host_pages,
                offloads_per_plan=loaded.offloads_per_plan,
                max_loading=loaded.max_loading,
                load_rule=loaded.load_rule,
                disk=loaded.disk,
                max_in_transit=self.capacity.max_in_transit,
            ),
            num_slots=self.capacity.num_slots,
            max_seq_len=self.capacity.max_seq_len,
            max_prefill_length=self.config.max_prefill_length,
            max_queued_requests=self.config.max_queued_requests,
            policy=self.config.schedule_policy,
            conservativeness=self.config.schedule_conservativeness,
            client_share=self.config.key_share,
            max_run=loaded.max_run,
            num_stages=self.config.pp,
            look_ahead=self.config.overlap,
        )
        # One step beyond those that run, one in each stage, is launched, so that the device never
        # waits for the loop.
        self._max_in_flight = self.config.pp + self.config.overlap
        self._streams: dict[str, OutputStream] = {}
        self._intake: Intake | None = None
        if self.tokenizer is not None:
            self._intake = Intake(
                self.tokenizer,
                max_seq_len=self.capacity.max_seq_len,
                num_places=self.config.max_running_requests + self.config.max_queued_requests,
            )
        # The choices of a request have the same rules.
        self._word_token_ids = lru_cache(16)(self._tokenize_words)
        self._mask_of = lru_cache(16)(partial(mask_of, self.vocab_size))
        self._masks = MaskFiller(self.vocab_size, self.defaults.eos_token_ids)
        self._deferred: tuple[StepPlan, Any] | None = None  # launched, not sampled; and its handle
        self._grammars: Grammars | None = None  # made when first needed
        self._meter = Meter()
        self._pump_is_due = False
        self._refusal: str | None = None  # why new requests are refused
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._process_id = os.getpid()
        self._collector = Collector(self._runner, self._on_step)
        self._landings: Landings[Any] | None = None
        if self.config.num_host_pages:
            self._landings = Landings(self._runner, self._on_landed)
        self._has_disk = loaded.disk is not None
        self._num_transfers = 0  # under way
        self._transfers_ended = asyncio.Event()
        self._transfers_ended.set()
        self._step_ended: asyncio.Event | None = None  # whoever waits for it, if anybody
        self._transfers: Transfers | None = None
        self._fingerprint = loaded.fingerprint
        self._fanout = Fanout(self._loop)
        self._closing: asyncio.Future[None] | None = None
        self._ranks = loaded.ranks
        first_limit_s = math.inf if self._ranks is None else FIRST_LIMIT_S
        self._watch = StepWatch(self.config.step_timeout, first_limit_s=first_limit_s)
        self._looking: asyncio.TimerHandle | None = None
        self._hung: asyncio.Future[None] = self._loop.create_future()  # done: steps may hang
        if self._ranks is not None:
            self._ranks.lost.add_done_callback(self._on_lost)

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
        """Start the template renderer, so that the first chat does not wait a second for it."""
        if self._intake is not None and self.tokenizer and self.tokenizer.has_chat_template:
            self._intake.warm()

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Tokenize a text.

        Raises ContextLengthError for a text that cannot fit into the context, unless `any_length`
        is set (not every such text is detected here); QueueFullError; EngineStoppedError.
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
        """Tokenize a conversation with the model's chat template; raises as `encode` does."""
        return await self._open_intake().chat(messages, any_length, template_options)

    async def template_facts(self) -> TemplateFacts:
        """What the chat template does with tools and reasoning. Raises EngineStoppedError."""
        return await self._open_intake().template_facts()

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

    async def compile(self, structured: StructuredOutput | None, client: str = "") -> Compiled:
        """Compile a constraint, for the matchers of requests; None constrains only reasoning.

        Clients take turns. Raises InvalidRequestError, which says what is wrong and where;
        QueueFullError; EngineStoppedError.
        """
        self._check_open()
        if self.tokenizer is None:
            raise InvalidRequestError("structured", "the model has no tokenizer.")
        if self._grammars is None:
            self._grammars = Grammars(
                self.tokenizer,
                self.vocab_size,
                self.defaults.eos_token_ids,
                observe=self._meter.grammar_compiled,
            )
        if structured is None:
            return await self._grammars.unconstrained()
        return await self._grammars.compile(structured, client)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        parser: AnswerParser | None = None,
        matcher: Matcher | None = None,
    ) -> OutputStream:
        """Queue a request, whose output `matcher` constrains.

        Cached prefixes are shared only between requests of the same client and `cache_salt`.
        `params.structured` needs a `matcher`, from `compile`. With a `parser`, which serves this
        answer alone, deltas have events and stop strings match content only.

        Raises InvalidRequestError, ContextLengthError, QueueFullError or EngineStoppedError.
        """
        self._check_open()
        if params.structured is not None and matcher is None:
            raise InvalidRequestError("structured", "needs a matcher: `compile` it first.")
        request = self._make_request(
            prompt_token_ids, params, request_id, cache_salt, tenant, self._ruled(params, matcher)
        )
        detokenizer = None
        if self.tokenizer is not None:
            make = Detokenizer if parser is None else partial(ParsingDetokenizer, parser=parser)
            detokenizer = make(
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

    async def share_pages(self, address: str, *, always_load: bool) -> str:
        """Exchange KV pages with other engines, which find this one at `address`.

        Called once, or again after a ConfigError.

        address: the path of a Unix socket, with a slash, or HOST:PORT; port 0 is any free one.
        Beyond this machine the engines need the same cluster token. always_load: load what they
        send even where this engine computes it faster.

        Returns the address, with the port. Raises ConfigError, also for an engine without a host
        cache or on several nodes; CheckpointError; EngineStoppedError.
        """
        config = self.config
        if not config.num_host_pages:
            raise ConfigError("--host-cache", 0, "engines exchange pages through it; allowed: more")
        if config.nnodes > 1:
            reason = "engines that exchange pages are on one node each; allowed: 1"
            raise ConfigError("--nnodes", config.nnodes, reason)
        self._check_open()
        place, token = await asyncio.to_thread(check_address, address, config)
        fingerprint = await asyncio.to_thread(self._fingerprint)
        page_bytes = self.model.on_rank(config.tp).kv_bytes_per_token(config.kv_dtype)
        page_bytes *= config.page_size * config.tp
        kv = self._scheduler.kv
        try:
            ranks = tuple(await asyncio.to_thread(self._runner.listen, address, token))
            self._check_open()
            direct = self._runner.shares_device
            sharing = Sharing(place, token, ranks, fingerprint, page_bytes, direct)
            self._transfers = Transfers(kv, sharing, self._runner.transfer, self._pump_soon)
        except OSError as error:
            reason = f"KV pages cannot be exchanged here: {error.strerror or error}"
            raise ConfigError("address", address, reason) from error
        if always_load:
            kv.load_always()
        return self._transfers.address

    async def offer_pages(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool:
        """Compute a prompt, and offer its pages to the other engines; False if there are none.

        Raises as `submit` does, and the errors of the request.
        """
        assert self._transfers is not None, "share_pages comes first"
        params = SamplingParams(max_tokens=1)
        stream = self.submit(
            prompt_token_ids, params, request_id=request_id, cache_salt=cache_salt, tenant=tenant
        )
        try:
            await stream.wait_finished()
        finally:
            stream.abort()
        prefix = self._transfers.prefix(prompt_token_ids, stream.request.namespace)
        return await self._transfers.offer(prefix)

    async def fetch_pages(
        self,
        address: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> bool:
        """Have the engine at `address` send the pages of a prompt that this one lacks.

        Returns whether there is something that need not be computed then. Raises
        InvalidRequestError for the salt.
        """
        assert self._transfers is not None, "share_pages comes first"
        prefix = self._transfers.prefix(prompt_token_ids, cache_namespace(tenant, cache_salt))
        return await self._transfers.fetch(address, prefix)

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the model cannot serve `params`."""
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop", "the model has no tokenizer to match strings with.")
        check_token_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        check_token_ids("logit_bias", params.logit_bias.keys(), self.vocab_size)
        check_token_ids("allowed_token_ids", params.allowed_token_ids or (), self.vocab_size)
        if params.bad_words and self.tokenizer is None:
            raise InvalidRequestError("bad_words", "the model has no tokenizer to find them with.")

    def _tokenize_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return () if self.tokenizer is None else word_token_ids(self.tokenizer, words)

    def _ruled(self, params: SamplingParams, matcher: Matcher | None) -> Matcher | None:
        """The matcher of a request, with what else limits its tokens."""
        if params.allowed_token_ids is None and not params.bad_words:
            return matcher
        self.check(params)
        if params.allowed_token_ids is not None and matcher is not None:
            raise InvalidRequestError("allowed_token_ids", NOT_BESIDE_A_CONSTRAINT)
        words = self._word_token_ids(tuple(params.bad_words))
        allowed = params.allowed_token_ids
        return TokenRules(self._mask_of(allowed and tuple(allowed)), words, matcher)

    def _make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        cache_salt: str | None,
        tenant: Tenant,
        matcher: Matcher | None,
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
            matcher=matcher,
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
        parser: AnswerParser | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """Submit a request and yield its deltas. Closing the iterator aborts the request.

        `params.structured` is compiled first; raises as `compile` does.
        """
        matcher: Matcher | None = None
        if params.structured is not None:
            matcher = (await self.compile(params.structured)).matcher()
        stream = self.submit(
            prompt_token_ids,
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            tenant=tenant,
            parser=parser,
            matcher=matcher,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    def _abort(self, request: Request) -> None:
        if self._scheduler.cancel(request):
            self._end_stream(request)
            self._pump_soon()  # its slot and pages may suffice to admit another request

    # -- the loop ----------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Schedule `_pump` once per loop iteration: requests submitted together share a step."""
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
        """Handle the end of a step or its failure. Called once for each step, in order."""
        self._watch.ended()
        if step != self._scheduler.next_to_settle:
            return  # discarded with an earlier step that failed
        try:
            if isinstance(outcome, Exception):
                self._fail_step(step, outcome)
                self._launch_steps()
            else:
                now = time.monotonic()
                self._meter.step_ended(now, captured=outcome.captured)
                settled = self._scheduler.settle(outcome)
                if settled.masked:
                    self._follow(settled.masked)
                if self._deferred is not None:
                    plan, handle = self._deferred
                    if self._scheduler.can_fill_masks(plan):
                        self._sample(plan, handle)
                self._launch_steps()
                self._hand_out(settled, now)
                if self._transfers is not None:
                    self._transfers.step_ended(step)
        except Exception as error:
            self._die(error)
        if self._step_ended is not None:
            self._step_ended.set()

    def _on_landed(self, load: int) -> None:
        """Let the requests that waited for a load run. Called once for each load."""
        if self.failure is None:
            self._scheduler.landed(load)
            self._pump_soon()

    def _transfer(self) -> None:
        """Begin what is to go to the disk, or to come from there."""
        transfers = self._scheduler.kv.take_transfers()
        if transfers:
            self._num_transfers += len(transfers)
            self._transfers_ended.clear()
            self._runner.transfer(transfers, self._on_transferred)

    def _on_transferred(self, transfer: int, num_pages: int) -> None:
        """Called by any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed without the engine
            self._loop.call_soon_threadsafe(self._end_transfer, transfer, num_pages)

    def _end_transfer(self, transfer: int, num_pages: int) -> None:
        """Let the request that waited for a transfer run. Called once for each transfer."""
        self._num_transfers -= 1
        if not self._num_transfers:
            self._transfers_ended.set()
        if self.failure is None:
            self._scheduler.transferred(transfer, num_pages)
            self._pump_soon()

    def _follow(self, masked: Sequence[Request]) -> None:
        """Tell matchers their requests' new tokens, and end the requests that are complete."""
        self._end_failed(self._masks.accept(masked))
        for request in masked:
            complete = request.matcher is not None and request.matcher.finished
            if complete and not request.finished:
                self._scheduler.finish(request, request.num_output_tokens)

    def _sample(self, plan: StepPlan, handle: Any) -> None:
        """Let the rest of a deferred plan follow, whose masks can be filled."""
        self._deferred = None
        try:
            self._runner.sample(handle, self._fill_masks(plan))
        except Exception as error:
            self._fail_step(plan.step, error)
        else:
            self._collect(plan, handle)

    def _fill_masks(self, plan: StepPlan) -> MaskRows:
        masks: MaskRows = self._runner.new_masks(plan)
        began = time.perf_counter()
        failures = self._masks.fill(self._scheduler.masked_requests(plan.step), masks)
        self._meter.masks_filled(len(masks), time.perf_counter() - began)
        self._end_failed(failures)
        return masks

    def _end_failed(self, failures: Failures) -> None:
        for request, error in failures:
            logger.warning("request %s: %s", request.id, error)
            self._scheduler.cancel(request, error)
            self._end_stream(request)

    def _collect(self, plan: StepPlan, handle: Any) -> None:
        self._collector.add(plan.step, handle)
        if self._landings is not None and plan.copies is not None and plan.copies.loads:
            self._landings.add(handle)
        self._watch.began(plan)
        if self._looking is None:
            self._look_later()

    def _launch_steps(self) -> None:
        """Launch what may be in flight; nothing follows a deferred plan before its sampling."""
        while (
            self.failure is None
            and self._deferred is None
            and self._scheduler.num_in_flight < self._max_in_flight
        ):
            plan = self._scheduler.plan()
            if self._has_disk:
                self._transfer()
            if plan is None:
                return
            if self._scheduler.num_in_flight == 1:
                self._meter.step_began(time.monotonic())
            try:
                if plan.masked_slots and not plan.deferred:
                    handle = self._runner.launch(plan, self._fill_masks(plan))
                else:
                    handle = self._runner.launch(plan)
            except Exception as error:
                self._fail_step(plan.step, error)
                continue
            if plan.deferred:
                self._deferred = plan, handle
            else:
                self._collect(plan, handle)

    def _hand_out(self, settled: Settled, now: float) -> None:
        finished: list[Request] = []
        for index, request in enumerate(settled.progressed):
            stream = self._streams.get(request.id)
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
            if request.id in self._streams:
                self._end_stream(request)

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
                self._scheduler.finish(request, index + 1 - request.num_prompt_tokens)
                break
        if request.finished:
            stream.text.append(detokenizer.flush(natural=natural))
        return dropped

    def _run_short(self, request: Request) -> None:
        """Fail one request because its text does not fit into memory; the others go on."""
        error = HostMemoryError()
        logger.error("request %s: %s", request.id, error)
        if not self._scheduler.cancel(request, error):  # already ended by its last token
            request.finish_reason, request.error = FinishReason.ERROR, error

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
        self._deferred = None  # it is later than any step that may fail
        if self._transfers is not None:  # steps before this one may be in flight
            self._transfers.step_ended((self._scheduler.next_to_settle or step) - 1)

    def _die(self, error: Exception) -> None:
        """Handle a fatal error: fail every open request with it."""
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
        self._deferred = None
        self._refusal = f"The engine has failed: {reason}"
        # The scheduler's state may be corrupt: end every request without using it.
        for stream in list(self._streams.values()):
            stream.request.status = RequestStatus.FINISHED
            stream.request.finish_reason = FinishReason.ERROR
            stream.request.error = reason
            self._end_stream(stream.request)
        if self._transfers is not None:
            self._transfers.close()

    @property
    def stalled(self) -> str | None:
        """A description of the step that takes much longer than similar ones; None if none does."""
        return self._watch.stalled

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Check on the steps in flight. Runs every second while there are any."""
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
        """Give up the steps in flight, because they will not end."""
        if self._ranks is not None:
            self._ranks.give_up(reason)
        else:
            self._on_hung(reason)

    def _on_lost(self, lost: Future[None]) -> None:
        """Handle the loss of a rank. Called by any thread."""
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

        Texts that are being tokenized are waited for too: their requests may still be submitted.
        """
        stopped = EngineStoppedError(reason)
        deadline = self._loop.time() + timeout_s
        if self._intake is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._intake.settle(), timeout_s)
            self._intake.close(stopped)
        if self._grammars is not None:
            self._grammars.close()
        self._refusal = self._refusal or f"{reason} It takes no more requests."
        try:
            await asyncio.wait_for(self._idle.wait(), deadline - self._loop.time())
        except TimeoutError:
            for stream in list(self._streams.values()):
                if self._scheduler.cancel(stream.request, stopped):
                    self._end_stream(stream.request)

    async def close(self) -> None:
        """End every request and free the device. Idempotent; concurrent calls wait for it, too."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.drain(0, CLOSED)
            if self._has_disk:
                with contextlib.suppress(TimeoutError, MinisglError):
                    await asyncio.wait_for(self._store_all(), STORE_S)
        finally:
            self._max_in_flight = 0
            self._deferred = None
            if self._transfers is not None:
                self._transfers.close()
            self._collector.end()
            if self._landings is not None:
                self._landings.end()
            await self._steps_end()
            await asyncio.to_thread(self._free, self._collector.ended.done())

    async def _store_all(self) -> None:
        """Write to disk what the other tiers hold, so that it outlives the engine."""
        self._max_in_flight = 0  # nothing follows
        await self._all_settle()
        if self.failure is not None:
            return
        plan = self._scheduler.plan_offload()
        if plan is not None:
            self._collect(plan, self._runner.launch(plan))
            await self._all_settle()
        if self.failure is None:
            self._scheduler.kv.store_all()
            self._transfer()
            await self._transfers_ended.wait()

    async def _all_settle(self) -> None:
        self._step_ended = asyncio.Event()
        while self._scheduler.num_in_flight and self.failure is None:
            self._step_ended.clear()
            await self._step_ended.wait()

    def _free(self, steps_have_ended: bool) -> None:
        # Closing a single rank blocks while a step hangs; several ranks handle that in `close`.
        if self._ranks is not None or steps_have_ended:
            self._runner.close()
        if self._intake is not None:
            self._intake.join()
        if self._grammars is not None:
            self._grammars.join()

    def abandon(self) -> None:
        """Free the device after the event loop has stopped. Waiting callers are not notified.

        Blocks until the steps in flight have ended or timed out. Any thread may call it.
        """
        if self._closing is not None:
            return
        if self._intake is not None:
            self._intake.end()
        if self._grammars is not None:
            self._grammars.close()
        self._collector.end()
        if self._landings is not None:
            self._landings.end()
        self._free(self._collector.join(self.config.step_timeout))

    async def _steps_end(self) -> None:
        """Wait until the launched steps have ended or are known to hang."""
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
            host=self._host_stats(),
            transfers=None if self._transfers is None else self._transfers.stats.copy(),
            counters=replace(self._scheduler.counters),
            totals=self._meter.totals.copy(),
        )

    def _host_stats(self) -> HostStats | None:
        if not self.config.num_host_pages:
            return None
        return HostStats(
            page_size=self.capacity.page_size,
            num_pages=self.config.num_host_pages,
            num_used_pages=self._scheduler.kv.num_host,
            traffic=self._runner.traffic() or HostTraffic.none(),
            has_disk=self._has_disk,
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


def _ending(request: Request, now: float) -> str:
    """A log line with the counts and times of a finished request, without any of its text."""
    assert request.finish_reason is not None
    first = request.first_token_s
    cached = f"{request.num_cached_tokens} cached"
    if request.num_host_tokens:
        cached += f", {request.num_host_tokens} of them from host memory"
    if request.num_disk_tokens:
        cached += f", {request.num_disk_tokens} of them from disk"
    return (
        f"request {request.id}: {request.finish_reason.value} after "
        f"{now - request.submitted_s:.3f} s, {request.num_prompt_tokens} prompt tokens "
        f"({cached}), {request.num_output_tokens} output tokens"
        + ("" if first is None else f" from {first - request.submitted_s:.3f} s on")
    )
