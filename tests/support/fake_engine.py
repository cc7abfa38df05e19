"""An engine without a model, with the face of AsyncEngine that the server uses.

A token is a byte. The answer to any prompt is the alphabet, starting at a letter that the seed
chooses; token i comes `interval` seconds after the one before it. Run as a script it is a whole
serving process: `python tests/support/fake_engine.py '{"interval": 0.1}' '{"port": 0}'`. It loads
until there is a file "loads_until", and no answer ends before there is a file "ends_after".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from minisgl.config import Capacity, EngineConfig
from minisgl.engine.stats import EngineStats, Totals
from minisgl.engine.vector_types import Embedding, EmbedOptions, Input, RerankOptions, Score
from minisgl.errors import (
    CallerError,
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    MinisglError,
    ModelNotFoundError,
    QueueFullError,
)
from minisgl.grammar.compiler import Compiled
from minisgl.images.prompt import Prompt
from minisgl.request import (
    EVERYONE,
    Extra,
    FinishReason,
    OutputDelta,
    SamplingParams,
    StructuredOutput,
    Tenant,
    TokenLogprobs,
)
from minisgl.scheduler.scheduler import SchedulerCounters
from minisgl.server.config import ServerConfig
from minisgl.server.process import ServerProcess
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.rendering import encode_call
from minisgl.text.template_facts import TemplateFacts

VOCAB_SIZE = 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"


async def made(path: str | None) -> None:
    """Wait until there is such a file, with which a test opens a gate in another process."""
    while path is not None and not Path(path).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.005)


class FakeTokenizer:
    drops_first_space = False

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        known = bytes(token_id for token_id in token_ids if 0 <= token_id < VOCAB_SIZE)
        return known.decode(errors="replace")

    def token_text(self, token_id: int, /) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id])

    chat_template_text = ""

    def added_token_id(self, text: str, /) -> int | None:
        return None

    def byte_table(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        return {token_id: bytes([token_id]) for token_id in range(VOCAB_SIZE)}


@dataclass(frozen=True)
class FakeAdapter(Extra):
    name: str
    folder: str = ""


class FakeAdapters(dict[str, FakeAdapter]):
    """A folder with a file "fails_once" is refused, and loses that file."""

    @property
    def loaded(self) -> str:
        return f"loaded: {', '.join(self)}."

    async def load(self, name: str, folder: str, *, root: str | None = None) -> None:
        with contextlib.suppress(FileNotFoundError):
            (Path(folder) / "fails_once").unlink()
            raise CallerError(f"The files are broken; {self.loaded}")
        if self.get(name, FakeAdapter(name, folder)).folder != folder:
            error = InvalidRequestError("lora", f"{name} is another adapter; {self.loaded}")
            error.http_status = 409
            raise error
        self[name] = FakeAdapter(name, folder)

    async def unload(self, name: str) -> None:
        if self.pop(name, None) is None:
            raise ModelNotFoundError(f"There is no adapter {name!r}; {self.loaded}")


def names_of(extras: Iterable[Extra]) -> list[str]:
    return [extra.name for extra in extras if isinstance(extra, FakeAdapter)]


class FakeDefaults:
    def sampling(self, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.5, **overrides})


class FakeStream:
    def __init__(
        self,
        engine: FakeEngine,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        adapters: Sequence[str],
    ) -> None:
        """adapters: the names of those that were asked for."""
        self.adapters = adapters
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.request = SimpleNamespace(
            id=request_id, submitted_s=None, admitted_s=None, first_token_s=None, finish_reason=None
        )
        self._engine = engine
        self._items: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self.task = asyncio.ensure_future(self._produce())
        engine.running[request_id] = self

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def wait_begun(self) -> None:
        await self._begun.wait()

    def abort(self) -> None:
        if self.request_id in self._engine.running:
            self._engine.aborted.append(self.request_id)
            self._end(OutputDelta([], "", 0, 0, finish_reason=FinishReason.ABORT))

    def fail(self, error: Exception) -> None:
        self._end(error)

    def _end(self, last: OutputDelta | Exception) -> None:
        if self._engine.running.pop(self.request_id, None) is not None:
            self.task.cancel()
            self._begun.set()
            self._items.put_nowait(last)
            self._items.put_nowait(None)

    async def _produce(self) -> None:
        engine, params = self._engine, self.params
        await engine.gate.wait()
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = engine.capacity.max_seq_len - len(self.prompt)
        if max_tokens == 0:
            self._end(self._delta(0, last=True))
        for index in range(max_tokens):
            await asyncio.sleep(engine.interval)
            last = index + 1 == max_tokens or (
                index + 1 == engine.answer_length and not params.ignore_eos
            )
            if last:
                await made(engine.ends_after)
            delta = self._delta(index + 1, last=last)
            if last:
                self._end(delta)
                return
            self._begun.set()
            self._items.put_nowait(delta)
            if index + 1 == engine.dies_at:
                engine.fail(RuntimeError("the device is gone"))
                return

    def _delta(self, count: int, *, last: bool) -> OutputDelta:
        """The one with token number `count`."""
        params = self.params
        ids = [ord(LETTERS[((params.seed or 0) + count - 1) % 26])] if count else []
        finish = None
        if last:
            stopped = not params.ignore_eos and count == self._engine.answer_length
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        scored = [] if params.logprobs is None else [self._score(id, params.logprobs) for id in ids]
        prompt_logprobs = []
        if params.prompt_logprobs is not None and count <= 1:
            prompt_logprobs = [self._score(id, params.prompt_logprobs) for id in self.prompt[1:]]
        return OutputDelta(
            token_ids=ids,
            text=bytes(ids).decode() * self._engine.repeat,
            num_output_tokens=count,
            num_cached_tokens=2,
            logprobs=scored,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            routed_experts=b"\1\0\2\0" if last and params.return_routed_experts else b"",
        )

    @staticmethod
    def _score(id: int, num: int) -> TokenLogprobs:
        rivals = tuple((rival, -1.0 - rival) for rival in range(num))
        return TokenLogprobs(id, -float("inf") if id == ord("z") else -0.5, 9, rivals)


class FakeVectors:
    """Vectors that tell the length of a text, and scores that tell that of a document."""

    def __init__(self, engine: FakeEngine, task: str) -> None:
        self.task = task
        self.asked: list[tuple[Any, ...]] = []  # options, salt and tenant of each call
        self.adapters: list[str] = []  # of the calls that asked for one
        self.num_open = 0
        self.num_aborted = 0
        self._engine = engine

    async def embed(
        self,
        inputs: Sequence[Input],
        options: EmbedOptions,
        *,
        cache_salt: str | None,
        tenant: Tenant,
        extras: Sequence[Extra],
        submitted: Callable[[Any], None],
    ) -> list[Embedding]:
        self.asked.append((options, cache_salt, tenant))
        self.adapters += names_of(extras)
        await self._computed(len(inputs))
        return [Embedding([len(each) / 3, -0.5], len(each), 0) for each in inputs]

    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        options: RerankOptions,
        *,
        cache_salt: str | None,
        tenant: Tenant,
        extras: Sequence[Extra],
        submitted: Callable[[Any], None],
    ) -> list[Score]:
        self.asked.append((options, cache_salt, tenant))
        self.adapters += names_of(extras)
        await self._computed(len(pairs))
        return [Score(len(two) / 100, len(one) + len(two), 0) for one, two in pairs]

    async def _computed(self, num: int) -> None:
        """Wait for the gate, as requests in prefill do."""
        if num > self._engine.max_queued:
            raise QueueFullError("Too many requests are waiting.")
        self.num_open += 1
        try:
            await self._engine.gate.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_open -= 1


class FakeWeights:
    """Of a folder; one with a file "fails_once" is refused, loses that file, and leaves the weights
    incomplete. `read` tells the folder, and the rank in the group of the trainer."""

    def __init__(self) -> None:
        self.folder, self.rank = "", 0
        self.refusal: MinisglError | None = None
        self.kv_of = b""

    async def update_from_files(self, folder: str, **_: object) -> str:
        with contextlib.suppress(FileNotFoundError):
            (Path(folder) / "fails_once").unlink()
            self._refuse("weights_incomplete")
            raise CallerError("The files are broken.")
        self.folder, self.refusal = folder, None
        return "1"

    async def sleep(self, level: int, in_flight: str) -> None:
        self._refuse("asleep")

    async def wake(self, tags: Sequence[str]) -> None:
        self._refuse("weights_incomplete")

    async def join_group(self, address: Any) -> None:
        self.rank = address.rank_offset

    async def read(self, name: str, num_rows: int) -> list[Any]:
        return [self.folder, self.rank]

    def _refuse(self, code: str) -> None:
        self.refusal = MinisglError("The weights are not there.")
        self.refusal.code, self.refusal.http_status = code, 503


class FakeEngine:
    model_name = "fake"
    vocab_size = VOCAB_SIZE
    tokenizer = FakeTokenizer()
    defaults = FakeDefaults()
    image_refusal = "this model takes text only"

    def __init__(
        self,
        *,
        interval: float = 0.0,
        answer_length: int | None = None,
        max_seq_len: int = 1000,
        max_queued: int = 1000,
        repeat: int = 1,
        dies_at: int | None = None,
        ends_after: str | None = None,
        task: str = "generate",
        adapters: Sequence[str] = (),
    ) -> None:
        """dies_at: the number of tokens after which the first answer is the last. ends_after: a
        file that is there before the last token of any answer comes."""
        self.interval = interval
        self.answer_length = answer_length
        self.max_queued = max_queued
        self.repeat = repeat  # of each token's text
        self.dies_at = dies_at
        self.ends_after = ends_after
        self.config = SimpleNamespace(num_ranks=2, device="cpu")
        self.capacity = Capacity(100, 16, 256, max_seq_len)
        self.vectors = FakeVectors(self, task)
        self.adapters = FakeAdapters((name, FakeAdapter(name)) for name in adapters)
        self.weights = FakeWeights()
        self.gate = asyncio.Event()  # while it is closed, requests stay in prefill
        self.gate.set()
        self.running: dict[str, FakeStream] = {}
        self.submitted: list[FakeStream] = []
        self.aborted: list[str] = []
        self.template_options: dict[str, Any] = {}  # of the last conversation
        self.failure: BaseException | None = None
        self.stalled: str | None = None
        self.draining = False
        self.closed = False

    def adapter(self, name: str) -> FakeAdapter:
        return self.adapters[name]

    async def encode(
        self, text: str, /, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        return list(text.encode())

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        /,
        **template_options: Any,
    ) -> list[int]:
        # As they reach the process that renders.
        self.template_options = msgspec.json.decode(encode_call(template_options))
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return list(text.encode())

    async def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool = False,
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
        /,
        **template_options: Any,
    ) -> Prompt:
        return Prompt(await self.encode_chat(messages, any_length, **template_options))

    async def template_facts(self) -> TemplateFacts:
        return TemplateFacts()

    async def compile(self, structured: StructuredOutput | None, client: str = "") -> Compiled:
        raise InvalidRequestError("structured", "the model has no tokenizer.")

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
    ) -> FakeStream:
        if self.failure is not None or self.draining:
            raise EngineStoppedError("The engine takes no more work.")
        if self.weights.refusal is not None:
            raise self.weights.refusal
        wanted = len(prompt_token_ids) + (params.max_tokens or 0)
        if wanted > self.capacity.max_seq_len or len(prompt_token_ids) == self.capacity.max_seq_len:
            raise ContextLengthError(
                len(prompt_token_ids), params.max_tokens, self.capacity.max_seq_len
            )
        if any(not 0 <= id < VOCAB_SIZE for id in prompt_token_ids):
            raise InvalidRequestError("prompt", "has a token id that is out of vocabulary.")
        if len(self.running) >= self.max_queued:
            raise QueueFullError("Too many requests are waiting.")
        adapters = names_of(extras)
        stream = FakeStream(self, prompt_token_ids, params, request_id or "anonymous", adapters)
        self.submitted.append(stream)
        return stream

    def fail(self, error: Exception) -> None:
        """Simulates a dead engine: every running stream fails."""
        self.failure = error
        for stream in list(self.running.values()):
            stream.fail(EngineStoppedError(f"The engine has failed: {error}"))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_queued=0,
            num_pages=self.capacity.num_pages - 1,
            num_free_pages=self.capacity.num_pages - 1,
            num_cached_pages=0,
            counters=SchedulerCounters(),
            totals=Totals(),
        )

    def warm(self) -> None:
        pass

    async def drain(self, seconds: float, /) -> None:
        self.draining = True
        if tasks := [stream.task for stream in self.running.values()]:
            await asyncio.wait(tasks, timeout=seconds)
        for stream in list(self.running.values()):
            stream.fail(EngineStoppedError("The server is shutting down."))

    async def close(self) -> None:
        self.closed = True


def main() -> int:
    behaviour = json.loads(sys.argv[1])
    loads_until = behaviour.pop("loads_until", None)
    load_error = behaviour.pop("load_error", None)

    async def start(config: EngineConfig) -> FakeEngine:
        await made(loads_until)
        if load_error:
            raise MinisglError(load_error)
        return FakeEngine(**behaviour)

    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        given = json.loads(sys.argv[2]).items()
        options = ServerConfig(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given}
        )
        lora = tuple(f"{name}=there" for name in behaviour.get("adapters", ()))
        return ServerProcess(EngineConfig(model="fake", lora=lora), options, start).run()
    except MinisglError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
