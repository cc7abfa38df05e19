"""The synchronous interface of the engine: `LLM(...).generate(prompts)`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import operator
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeAlias, TypeVar, Unpack, overload

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl.config import EngineConfig, EngineOptions, KeywordError, Text, config_of, in_keywords
from minisgl.engine import AsyncEngine
from minisgl.engine.answer_plan import AnswerPlan
from minisgl.engine.chats import Chats
from minisgl.engine.engine import forked
from minisgl.engine.stream import OutputStream
from minisgl.engine.vector_types import Embedding, EmbedOptions, RerankOptions, Score
from minisgl.engine.weights import InFlight, NamedTensors
from minisgl.errors import (
    ConfigError,
    DeadlineError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)
from minisgl.events import CallArguments, CallStart, Event, ReasoningText, has_broken_call
from minisgl.images.prompt import Prompt as ChatPrompt
from minisgl.parameters import check_names
from minisgl.parts.experts.host import experts_of
from minisgl.parts.scores.host import scores_of
from minisgl.parts.weights.host import versions_of
from minisgl.printable import counted
from minisgl.progress import LoadProgress
from minisgl.request import (
    NO_PARAMETER,
    Extra,
    OutputDelta,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
    ToolCall,
)
from minisgl.sampling_options import ChatOptions, SamplingOptions
from minisgl.text.parsing.parsing_detokenizer import ParsingDetokenizer

# The caller waits for all answers anyway, so a bound would only refuse prompts.
UNBOUNDED_QUEUE = 1 << 31

NOT_BOOLS = "must be texts or token ids, which are integers; True and False are neither."

Prompt = str | Iterable[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
T = TypeVar("T")

SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)
# The parameters of `LLM.chat` itself.
CHAT_NAMES = frozenset(
    "messages sampling_params tools response_format chat_template_kwargs n cache_salt lora "
    "timeout".split()
)


class LLM:
    """A loaded model. All methods are thread-safe; `close` it after use.

        with LLM("Qwen/Qwen3-0.6B", dtype="bfloat16") as llm:
            [output] = llm.generate(["The capital of France is"])

    The options are the fields of EngineConfig, also by their other spellings on the command line.
    The engine runs on an event loop in a thread of its own.
    """

    def __init__(self, model: Text = "", /, **options: Unpack[EngineOptions]) -> None:
        """Load the model; blocks until it is ready. Raises MinisglError."""
        if model != "" and "model" in options:
            reason = "the model is the first argument, too; allowed: one of them"
            raise KeywordError("model", options["model"], reason)
        given: dict[str, Any] = {**options} if model == "" else {"model": model, **options}
        self._given = given
        self._closed = False
        config = config_of({"max_queued_requests": UNBOUNDED_QUEUE, **given})
        self._process_id = os.getpid()
        self._waiting: set[threading.Thread] = set()  # threads that wait for an answer
        self._entry = threading.Lock()  # orders new waiters and the end
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="minisgl-engine", daemon=True
        )
        self._thread.start()
        try:
            with LoadProgress() as progress:
                self._wait_for(self._start(config, progress))
        except ConfigError as error:
            self._stop_loop()
            raise in_keywords(error, given) from None
        except Exception:
            self._stop_loop()
            raise
        except BaseException:  # Ctrl-C does not wait for the loading thread
            self._closed = True
            self._end_thread()
            raise
        # This hook runs while worker threads still live. `atexit` hooks run after these have been
        # joined, when every step would fail.
        threading._register_atexit(_abandon, weakref.ref(self))  # type: ignore[attr-defined]

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        progress: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids); returns the outputs in their order.

        sampling_params: one for all prompts or one for each; None: the checkpoint's defaults.
        sampling: fields of SamplingParams by name, such as `max_tokens=16`, which replace those of
        sampling_params. The outputs of SamplingParams(structured=StructuredOutput(...)) follow its
        constraint, and `parsed` is the value of a JSON one. Without max_tokens an output may fill
        the rest of the context. n: outputs for each prompt, which follow each other in the list; a
        seed is that of the first, and the others have the seeds that a server gives them.
        cache_salt: cached prefixes are shared only between calls with the same salt. lora: the name
        of the adapter that answers; None: the model itself. timeout: the seconds that all outputs
        together may take; DeadlineError is raised when they are over. progress: draw a bar if
        stderr is a terminal. Raises MinisglError for the first prompt that is refused or fails,
        after aborting the others.
        """
        batch = _as_batch(prompts)
        others = ("n", "cache_salt", "lora", "timeout", "progress", "sampling_params")
        check_names(sampling, SAMPLING_NAMES, NO_PARAMETER, others)
        params = self._sampling(sampling_params, sampling, len(batch), "prompt")
        _check_timeout(timeout)
        return self._wait_for(self._run(batch, params, n, cache_salt, lora, progress), timeout)

    @overload
    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        response_format: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        response_format: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        response_format: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        response_format: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        n: int | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Generate the reply to a conversation, a list of {"role": ..., "content": ...}.

        A content is a text or a list of parts: {"type": "text", "text": ...}, {"type": "image",
        "image": ...} with an image of Pillow, bytes or a path, and OpenAI's image_url.

        For a list of conversations, and with n, the result is a list: the n replies to each
        conversation follow each other.

        options: fields of SamplingParams by name, which replace those of sampling_params, and
        variables of the chat template, such as `enable_thinking=False`; other names are refused.
        chat_template_kwargs: more such variables, of names that type checkers do not know.
        tools: Python functions with annotations and a docstring, or OpenAI's form. The reply's
        `reasoning` and `tool_calls` are taken out of its `text` where the model's format is known.
        response_format: a JSON schema (a dict) or a pydantic model, which the reply follows. Its
        value is `parsed`: an instance of the model, of which pydantic raises ValidationError where
        it checks more than a schema says; None where the reply was cut.
        cache_salt, lora, timeout: as in `generate`.
        """
        _check_timeout(timeout)
        conversations, is_one = _as_conversations(messages)
        asked = self._ask(sampling_params, response_format, tools, options, chat_template_kwargs)
        outputs = self._wait_for(self._answer(conversations, asked, n, cache_salt, lora), timeout)
        if hasattr(response_format, "model_validate"):
            for output in outputs:
                if output.parsed is not None:
                    output.parsed = response_format.model_validate(output.parsed)
        return outputs[0] if is_one and n is None else outputs

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        response_format: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[OutputDelta]:
        """Yield the answer to a prompt, or to a conversation as `chat` takes it, piece by piece.

            for piece in llm.stream([{"role": "user", "content": "Hello!"}]):
                print(piece.text, end="", flush=True)

        Output that has come since the last piece is one piece. `events` of a conversation has the
        reasoning and the calls beside the text. Leaving the loop ends the request. timeout: the
        seconds until the last piece. Raises MinisglError with the first piece, or where the answer
        fails.
        """
        _check_timeout(timeout)
        ends = None if timeout is None else time.monotonic() + timeout
        stream = self._wait_for(
            self._open(
                prompt,
                sampling_params,
                response_format=response_format,
                tools=tools,
                cache_salt=cache_salt,
                lora=lora,
                options=options,
                template_kwargs=chat_template_kwargs,
            ),
            timeout,
        )
        try:
            while True:
                left = None if ends is None else ends - time.monotonic()
                piece = self._wait_for(_next(stream), left)
                if piece is None:
                    return
                yield piece
        finally:
            # May run in any thread, also that of the loop, when the generator is collected.
            if os.getpid() == self._process_id:
                with contextlib.suppress(RuntimeError):  # the loop was closed, and the engine
                    self._loop.call_soon_threadsafe(stream.abort)

    def _ask(
        self,
        sampling_params: SamplingParams | None,
        response_format: Any,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        template_kwargs: Mapping[str, Any] | None,
    ) -> _Asked:
        """What the options of a conversation say. Raises InvalidRequestError."""
        sampling = {name: options[name] for name in options if name in SAMPLING_NAMES}
        variables = {name: options[name] for name in options if name not in SAMPLING_NAMES}
        if not isinstance(template_kwargs, Mapping | None):
            raise InvalidRequestError("chat_template_kwargs", "must be a dict of variables.")
        for name in template_kwargs or ():
            if name in CHAT_NAMES | SAMPLING_NAMES | options.keys():
                reason = f"{name} is an argument of its own, and cannot be given here."
                raise InvalidRequestError("chat_template_kwargs", reason)
        variables.update(template_kwargs or {})
        if variables:
            self._chats.check_options(variables, SAMPLING_NAMES | CHAT_NAMES)
        [params] = self._sampling(sampling_params, sampling, 1, "conversation")
        if response_format is not None:
            if params.structured is not None:
                raise InvalidRequestError(
                    "response_format", "is not allowed with `structured` in sampling_params."
                )
            params = replace(params, structured=_structured(response_format))
        if tools is not None and not isinstance(tools, list | tuple):
            raise InvalidRequestError("tools", "must be a list of functions, or of OpenAI's form.")
        return _Asked(params, tuple(tools or ()), variables)

    def _sampling(
        self,
        given: SamplingParams | Sequence[SamplingParams] | None,
        named: Mapping[str, Any],
        num: int,
        what: str,
    ) -> Sequence[SamplingParams]:
        """The parameters of `num` requests; named: fields that replace the given ones."""
        if given is None:
            return [self.engine.defaults.sampling(**named)] * num
        if isinstance(given, SamplingParams):
            return [replace(given, **named)] * num
        if not isinstance(given, list | tuple) or not all(
            isinstance(one, SamplingParams) for one in given
        ):
            raise InvalidRequestError(
                "sampling_params",
                "must be SamplingParams, one or a list; fields may be given by name instead.",
            )
        if len(given) != num:
            raise InvalidRequestError("sampling_params", f"{len(given)} for {counted(num, what)}.")
        return [replace(params, **named) for params in given] if named else given

    @functools.cached_property
    def _chats(self) -> Chats:
        return Chats(self.engine)

    def embed(
        self,
        inputs: Prompt | Iterable[Prompt],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> list[Embedding]:
        """The vectors of texts (or token ids, which are taken as they are), in their order.

        prompt_name: which of the checkpoint's prompts precedes each text; None: its default one.
        instruction: what the texts, which are queries, look for; for models with a form for it.
        dimensions: the first numbers of each vector that are kept, normalised again.
        truncate_prompt_tokens: tokens to which longer texts are cut, -1 for all that the model
        takes; None refuses them. Raises MinisglError.
        """
        options = EmbedOptions(
            prompt_name=prompt_name,
            instruction=instruction,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        batch = _as_batch(inputs)
        extras, vectors = self._adapter(lora), self.engine.vectors
        return self._wait_for(vectors.embed(batch, options, cache_salt=cache_salt, extras=extras))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens_per_doc: int | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> list[Score]:
        """The scores of documents, 0 to 1, in their order; of a model with task="rerank".

        instruction: what to look for; None: the passages that answer a web search.
        truncate_prompt_tokens: as in `embed`, of the whole prompt. max_tokens_per_doc: tokens to
        which longer documents are cut. Raises MinisglError.
        """
        pairs = [(query, document) for document in documents]
        options = RerankOptions(
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
            max_tokens_per_doc=max_tokens_per_doc,
        )
        extras, vectors = self._adapter(lora), self.engine.vectors
        return self._wait_for(vectors.rerank(pairs, options, cache_salt=cache_salt, extras=extras))

    def load_lora(self, name: str, folder: Text) -> None:
        """Load an adapter (LoRA) beside the requests that run, for which the options `lora` or
        `max_loras` have made room. The same again changes nothing. Raises MinisglError: for another
        adapter under a name that is taken, and for what is wrong with the files.
        """
        path = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
        self._wait_for(self.engine.adapters.load(name, path))

    def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter. Those that run or wait go on with it. Raises
        MinisglError."""
        self._wait_for(self.engine.adapters.unload(name))

    def update_weights(
        self,
        tensors: NamedTensors,
        *,
        version: str | None = None,
        partial: bool = False,
        in_flight: InFlight = "keep",
    ) -> str:
        """Replace the weights in place by tensors with the checkpoint's names, such as those of
        `model.state_dict()`; returns their version, by default a random name.

            llm.update_weights(trained.state_dict(), version="step 10")

        All names, dtypes and shapes are checked before anything changes. partial: the weights that
        are not given stay. in_flight: requests that have begun "keep" the KV of the old weights or
        "recompute" it, or all "abort" with the tokens that they have. No cached prefix outlives its
        weights. Raises MinisglError; where a number is not finite, the model answers nothing until
        another update succeeds.
        """
        update = self.engine.weights.update
        return self._wait_for(
            update(tensors, version=version, partial=partial, in_flight=in_flight)
        )

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until `wake_up`, for a trainer on the same
        device. level: 1 keeps the weights in memory of the host; 2 drops them, and a whole update
        must follow once they are awake. Raises MinisglError."""
        self._wait_for(self.engine.weights.sleep(level))

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory of "weights" or "kv_cache" again, by default of both. Raises
        MinisglError."""
        self._wait_for(self.engine.weights.wake(tags))

    def close(self) -> None:
        """Abort running requests and free the device. Idempotent; without effect in a fork."""
        if os.getpid() != self._process_id:
            return
        with self._closing:
            if not self._closed:
                self._wait_for(self.engine.close())
                self._stop_loop()

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self._given.items()]
        return f"<{'closed ' * self._closed}LLM({', '.join(given)})>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _start(self, config: EngineConfig, progress: LoadProgress) -> None:
        self.engine = await AsyncEngine.start(config, progress)

    def _stop_loop(self) -> None:
        with self._entry:
            self._closed = True
        end_threads = self._loop.shutdown_default_executor()
        asyncio.run_coroutine_threadsafe(end_threads, self._loop).result()
        self._end_thread()

    def _end_thread(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop_after_others(), self._loop)
        self._thread.join()
        self._loop.close()

    async def _stop_after_others(self) -> None:
        """Stop the loop once all other tasks have ended, so that no caller waits for ever."""
        if hasattr(self, "engine"):  # Ctrl-C came when it had just started, or it is closed already
            await self.engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    def _abandon(self) -> None:
        """Finish at interpreter exit, which waits for other threads and so for their answers."""
        if os.getpid() != self._process_id:
            return
        while True:
            with self._entry:
                others = [
                    thread
                    for thread in self._waiting
                    if not thread.daemon and thread is not threading.current_thread()
                ]
                if not others:
                    was_closed, self._closed = self._closed, True
                    break
            for thread in others:
                thread.join()
        if was_closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.engine.abandon()

    def _wait_for(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """What `work` returns. Raises DeadlineError if it takes more seconds than `timeout`."""
        if os.getpid() != self._process_id:
            work.close()
            raise EngineStoppedError(forked(self._process_id))
        thread = threading.current_thread()
        with self._entry:
            if self._closed:
                work.close()
                raise EngineStoppedError("This LLM is closed.")
            limited = work if timeout is None else _within(timeout, work)
            future = asyncio.run_coroutine_threadsafe(limited, self._loop)
            self._waiting.add(thread)
        try:
            return future.result()
        except BaseException:  # including Ctrl-C: cancel the work
            future.cancel()
            raise
        finally:
            self._waiting.discard(thread)

    async def _answer(
        self,
        conversations: Sequence[Messages],
        asked: _Asked,
        n: int | None,
        salt: str | None,
        lora: str | None,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        prompts: list[_ReadPrompt] = []

        async def run() -> None:
            params = [asked.params] * len(prompts)
            outputs.extend(await self._run(prompts, params, n, salt, lora, len(conversations) > 1))

        for messages in conversations:
            try:
                read = await self._read(messages, asked, salt)
            except QueueFullError:
                if not prompts:
                    raise
                await run()  # their images are in the way
                prompts.clear()
                read = await self._read(messages, asked, salt)
            prompts.append(read)
        await run()
        return outputs

    async def _read(self, messages: Messages, asked: _Asked, salt: str | None) -> _ReadPrompt:
        conversation = await self._chats.read(
            messages, asked.tools, asked.variables, cache_salt=salt
        )
        plan = await self._chats.plan(conversation, asked.params)
        return _ReadPrompt(conversation.prompt, plan)

    async def _open(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None,
        response_format: Any,
        tools: Sequence[Any] | None,
        cache_salt: str | None,
        lora: str | None,
        options: Mapping[str, Any],
        template_kwargs: Mapping[str, Any] | None,
    ) -> OutputStream:
        """Submit the request of `stream`."""
        items = prompt if isinstance(prompt, str) else [*_iterate(prompt)]
        if isinstance(items, list) and any(isinstance(item, Mapping) for item in items):
            asked = self._ask(sampling_params, response_format, tools, options, template_kwargs)
            read = await self._read(items, asked, cache_salt)
            return await self._submit(read, asked.params, cache_salt, lora)
        of_chats = (tools or None, response_format, template_kwargs)
        names = ("tools", "response_format", "chat_template_kwargs")
        for name, value in zip(names, of_chats, strict=True):
            if value is not None:
                raise InvalidRequestError(name, "is for conversations, not for prompts.")
        check_names(
            options,
            SAMPLING_NAMES,
            NO_PARAMETER,
            ("cache_salt", "lora", "timeout", "sampling_params"),
        )
        [one, *others] = _as_batch(items) or [[]]
        if others:
            raise InvalidRequestError("prompt", "must be one: a text, token ids or messages.")
        [params] = self._sampling(sampling_params, options, 1, "prompt")
        return await self._submit(one, params, cache_salt, lora)

    async def _submit(
        self,
        prompt: str | Sequence[int] | _ReadPrompt,
        params: SamplingParams,
        salt: str | None,
        lora: str | None,
    ) -> OutputStream:
        if isinstance(prompt, str):
            prompt = await self.engine.encode(prompt)
        if not isinstance(prompt, _ReadPrompt):
            wanted = params.structured
            grammar = None if wanted is None else await self.engine.compile(wanted)
            prompt = _ReadPrompt(ChatPrompt([*prompt]), AnswerPlan(grammar=grammar))
        given, plan = prompt.prompt, prompt.plan
        extras = (*plan.extras(), *given.extras, *self._adapter(lora))
        return self.engine.submit(
            given.token_ids, params, cache_salt=salt, extras=extras, parser=plan.parser()
        )

    def _adapter(self, lora: str | None) -> tuple[Extra, ...]:
        """What asks for an adapter, among the extras of a request. Raises InvalidRequestError."""
        return () if lora is None else (self.engine.adapter(lora),)

    async def _run(
        self,
        prompts: Sequence[str | list[int] | _ReadPrompt],
        params: Sequence[SamplingParams],
        n: int | None,
        cache_salt: str | None,
        lora: str | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if n is not None and not (type(n) is int and n >= 1):
            raise InvalidRequestError("n", f"must be an integer of at least 1, not {n!r}.")
        encoded = [
            await self.engine.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        streams: list[OutputStream] = []
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        tokens_column = TextColumn("{task.fields[rate]:.0f} tok/s")
        try:
            for prompt, prompt_params in zip(encoded, params, strict=True):
                for choice in range(n or 1):
                    own = prompt_params.for_choice(choice)
                    streams.append(await self._submit(prompt, own, cache_salt, lora))
            with Progress(
                *columns,
                tokens_column,
                TimeElapsedColumn(),
                console=console,
                transient=True,
                disable=not (progress and console.is_terminal),
                redirect_stdout=False,
                redirect_stderr=False,
            ) as bar:
                task = bar.add_task("Generating", total=len(streams), rate=0.0)
                num_tokens = 0

                async def finish(stream: OutputStream) -> RequestOutput:
                    nonlocal num_tokens
                    output = await _gather(stream)
                    num_tokens += len(output.token_ids)
                    elapsed = bar.tasks[task].elapsed or 1e-9
                    bar.update(task, advance=1, rate=num_tokens / elapsed)
                    return output

                outputs = await asyncio.gather(*map(finish, streams))
            for index, output in enumerate(outputs):
                given = encoded[index // (n or 1)]
                if isinstance(given, _ReadPrompt):
                    output.prompt_token_ids = given.prompt.shown_token_ids
            return outputs
        finally:
            for stream in streams:
                stream.abort()


def _check_timeout(seconds: float | None) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and seconds > 0):
        reason = f"must be a number of seconds above 0, not {seconds!r}."
        raise InvalidRequestError("timeout", reason)


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError from None


async def _next(stream: OutputStream) -> OutputDelta | None:
    """The next delta, None at the end."""
    return await anext(stream, None)


async def _gather(stream: OutputStream) -> RequestOutput:
    """Collect a whole output, waking the loop only once."""
    await stream.wait_finished()
    request = stream.request
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if request.params.prompt_logprobs is not None:
        prompt_logprobs = [None, *scores_of(request)]
    text = "".join(stream.text)
    events: Sequence[Event] = ()
    if isinstance(stream.detokenizer, ParsingDetokenizer):
        events = stream.detokenizer.take_events()
    reason = request.finish_reason
    if reason is not None and has_broken_call(events):
        reason = reason.with_broken_call()
    return RequestOutput(
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        token_ids=request.output_token_ids,
        text=text,
        finish_reason=reason.value if reason else None,
        num_cached_tokens=request.num_cached_tokens,
        num_host_tokens=request.num_host_tokens,
        num_disk_tokens=request.num_disk_tokens,
        num_drafted_tokens=request.num_drafted_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        parsed=_parse(text, request.params.structured),
        reasoning=_reasoning_of(events),
        tool_calls=_calls_of(events),
        routed_experts=experts_of(request),
        weight_versions=versions_of(request),
    )


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    """The prompt of a conversation, and the plan of its answers."""

    prompt: ChatPrompt
    plan: AnswerPlan


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of a conversation besides its messages."""

    params: SamplingParams
    tools: Sequence[Any]
    variables: Mapping[str, Any]  # of the chat template


def _reasoning_of(events: Sequence[Event]) -> str | None:
    return "".join(event.text for event in events if isinstance(event, ReasoningText)) or None


def _calls_of(events: Sequence[Event]) -> list[ToolCall]:
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return [ToolCall(name, text) for name, text in zip(names, arguments, strict=True)]


def _as_conversations(messages: Any) -> tuple[list[Messages], bool]:
    """Conversations, and whether one was given instead of a list of them."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequestError(
            "messages", 'must be a list of {"role": ..., "content": ...}, or a list of such lists.'
        )
    items = [*messages]
    if items and all(isinstance(item, list | tuple) for item in items):
        return items, False
    return [items], True


def _parse(text: str, structured: StructuredOutput | None) -> Any:
    """The value of a JSON constraint; None where the text was cut, or nothing says it is JSON."""
    if structured is None or not (structured.json_object or structured.json_schema is not None):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _structured(response_format: Any) -> StructuredOutput:
    """A JSON schema, or what OpenAI's API takes in its place."""
    if isinstance(response_format, Mapping):
        match response_format.get("type"), response_format.get("json_schema"):
            case "json_object", None:
                return StructuredOutput(json_object=True, field="response_format")
            case "json_schema", {"schema": schema}:
                return StructuredOutput(json_schema=schema, field="response_format")
    return StructuredOutput(json_schema=_schema_of(response_format), field="response_format")


def _schema_of(response_format: Any) -> Any:
    if isinstance(response_format, Mapping):
        return response_format
    if hasattr(response_format, "model_json_schema"):
        return response_format.model_json_schema()
    raise InvalidRequestError(
        "response_format", "must be a JSON schema (a dict) or a pydantic model."
    )


def _abandon(reference: weakref.ref[LLM]) -> None:
    llm = reference()
    if llm is not None:
        llm._abandon()


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """Normalize prompts to a list; a single prompt becomes a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    items = [*_iterate(prompts)]
    token_ids = [_as_token_id(item) for item in items if isinstance(item, Integral)]
    batch = [_as_prompt(item) for item in items if not isinstance(item, Integral)]
    if token_ids and batch:
        raise InvalidRequestError("prompts", "either one prompt's token ids, or several prompts.")
    return [token_ids] if token_ids else batch


def _as_prompt(item: Any) -> str | list[int]:
    """Normalize a prompt to a str or a list of int, also from arrays of other libraries."""
    if isinstance(item, str):
        return item
    try:
        return [_as_token_id(token_id) for token_id in _iterate(item)]
    except TypeError as error:
        raise InvalidRequestError("prompts", "must be texts or token ids.") from error


def _as_token_id(item: Any) -> int:
    if isinstance(item, bool):
        raise InvalidRequestError("prompts", NOT_BOOLS)
    return operator.index(item)


def _iterate(items: Any) -> Iterable[Any]:
    if str(getattr(items, "dtype", "")).endswith("bool"):  # a mask of NumPy or PyTorch
        raise InvalidRequestError("prompts", NOT_BOOLS)
    if isinstance(items, bytes | bytearray | memoryview):
        raise InvalidRequestError(
            "prompts", "bytes are neither a text nor token ids; decode them, or make a list."
        )
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidRequestError(
            "prompts", "must be texts or token ids: one prompt, or a list or iterator of them."
        )
    return items
