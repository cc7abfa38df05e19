"""The synchronous interface of the engine: `LLM(...).generate(prompts)`."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl.config import EngineConfig
from minisgl.engine import AsyncEngine
from minisgl.engine.engine import forked
from minisgl.engine.stream import OutputStream
from minisgl.engine.vectors import Embedding, EmbedOptions, Score
from minisgl.errors import EngineStoppedError, InvalidRequestError
from minisgl.progress import LoadProgress
from minisgl.request import RequestOutput, SamplingParams, StructuredOutput, TokenLogprobs

# The caller waits for all answers anyway, so a bound would only refuse prompts.
UNBOUNDED_QUEUE = 1 << 31

NOT_BOOLS = "must be texts or token ids, which are integers; True and False are neither."

Prompt = str | Iterable[int]
T = TypeVar("T")


class LLM:
    """A loaded model. All methods are thread-safe; `close` it after use.

        with LLM("Qwen/Qwen3-0.6B", dtype="bfloat16") as llm:
            [output] = llm.generate(["The capital of France is"])

    The options are those of EngineConfig. The engine runs on an event loop in a thread of its own.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        """Load the model; blocks until it is ready. Raises MinisglError."""
        config = EngineConfig(model=model, **{"max_queued_requests": UNBOUNDED_QUEUE, **options})
        self._closed = False
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
        cache_salt: str | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids); returns the outputs in their order.

        sampling_params: one for all prompts or one for each; None: the checkpoint's defaults.
        The outputs of SamplingParams(structured=StructuredOutput(...)) follow its constraint, and
        `parsed` is the value of a JSON one. Without max_tokens an output may fill the rest of the
        context. cache_salt: cached prefixes are shared only between calls with the same salt.
        progress: draw a bar if stderr is a terminal. Raises MinisglError for the first prompt that
        is refused or fails, after aborting the others.
        """
        batch = _as_batch(prompts)
        if sampling_params is None:
            sampling_params = self.engine.defaults.sampling()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(batch)
        if not all(isinstance(params, SamplingParams) for params in sampling_params):
            raise InvalidRequestError("sampling_params", "must be SamplingParams, one or a list.")
        if len(sampling_params) != len(batch):
            raise InvalidRequestError(
                "sampling_params", f"{len(sampling_params)} for {len(batch)} prompts."
            )
        return self._wait_for(self._run(batch, sampling_params, cache_salt, progress))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        response_format: Any = None,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Generate the reply to a conversation, a list of {"role": ..., "content": ...}.

        response_format: a JSON schema (a dict) or a pydantic model, which the reply follows. Its
        value is `parsed`: an instance of the model, of which pydantic raises ValidationError where
        it checks more than a schema says; None where the reply was cut.
        """
        if response_format is not None:
            if sampling_params is None:
                sampling_params = self.engine.defaults.sampling()
            if sampling_params.structured is not None:
                raise InvalidRequestError(
                    "response_format", "is not allowed with `structured` in sampling_params."
                )
            structured = StructuredOutput(
                json_schema=_schema_of(response_format), field="response_format"
            )
            sampling_params = replace(sampling_params, structured=structured)
        prompt = self._wait_for(self.engine.encode_chat(messages, **template_options))
        [output] = self.generate([prompt], sampling_params, cache_salt=cache_salt, progress=False)
        if output.parsed is not None and hasattr(response_format, "model_validate"):
            output.parsed = response_format.model_validate(output.parsed)
        return output

    def embed(
        self,
        inputs: Prompt | Iterable[Prompt],
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
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
        return self._wait_for(self.engine.embed(batch, options, cache_salt=cache_salt))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> list[Score]:
        """The scores of documents, 0 to 1, in their order; of a model with task="rerank".

        instruction: what to look for; None: the passages that answer a web search.
        truncate_prompt_tokens: as in `embed`. Raises MinisglError.
        """
        pairs = [(query, document) for document in documents]
        return self._wait_for(
            self.engine.rerank(
                pairs,
                instruction=instruction,
                truncate_prompt_tokens=truncate_prompt_tokens,
                cache_salt=cache_salt,
            )
        )

    def close(self) -> None:
        """Abort running requests and free the device. Idempotent; without effect in a fork."""
        if os.getpid() != self._process_id:
            return
        with self._closing:
            if not self._closed:
                self._wait_for(self.engine.close())
                self._stop_loop()

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

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            work.close()
            raise EngineStoppedError(forked(self._process_id))
        thread = threading.current_thread()
        with self._entry:
            if self._closed:
                work.close()
                raise EngineStoppedError("This LLM is closed.")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting.add(thread)
        try:
            return future.result()
        except BaseException:  # including Ctrl-C: cancel the work
            future.cancel()
            raise
        finally:
            self._waiting.discard(thread)

    async def _run(
        self,
        prompts: Sequence[str | list[int]],
        params: Sequence[SamplingParams],
        cache_salt: str | None,
        progress: bool,
    ) -> list[RequestOutput]:
        encoded = [
            await self.engine.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        streams: list[OutputStream] = []
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        tokens_column = TextColumn("{task.fields[rate]:.0f} tok/s")
        try:
            for prompt_ids, request_params in zip(encoded, params, strict=True):
                matcher = None
                if request_params.structured is not None:
                    matcher = (await self.engine.compile(request_params.structured)).matcher()
                stream = self.engine.submit(
                    prompt_ids, request_params, cache_salt=cache_salt, matcher=matcher
                )
                streams.append(stream)
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

                return await asyncio.gather(*map(finish, streams))
        finally:
            for stream in streams:
                stream.abort()


async def _gather(stream: OutputStream) -> RequestOutput:
    """Collect a whole output, waking the loop only once."""
    await stream.wait_finished()
    request = stream.request
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if request.params.prompt_logprobs is not None:
        prompt_logprobs = [None, *request.prompt_logprobs]
    text = "".join(stream.text)
    return RequestOutput(
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        token_ids=request.output_token_ids,
        text=text,
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        num_cached_tokens=request.num_cached_tokens,
        num_host_tokens=request.num_host_tokens,
        num_disk_tokens=request.num_disk_tokens,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        parsed=_parse(text, request.params.structured),
    )


def _parse(text: str, structured: StructuredOutput | None) -> Any:
    """The value of a JSON constraint; None where the text was cut, or nothing says it is JSON."""
    if structured is None or not (structured.json_object or structured.json_schema is not None):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


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
