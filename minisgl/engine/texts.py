"""Turns texts and conversations into token ids, before they reach the engine.

A short text is encoded on the event loop, in under a millisecond. Everything else runs on a few
daemon threads, which do not keep the process alive. Neither long texts nor chat templates that
never finish delay short texts: a rendering that takes longer than others is killed, and repeated
in a line of its own. One for which nobody waits any more is killed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from minisgl.engine.work_queue import WorkQueue
from minisgl.errors import MinisglError, QueueFullError, TextTooLongError
from minisgl.places import Shares
from minisgl.text.rendering import EndlessTemplateError, Renderer, encode_call
from minisgl.text.template_facts import TemplateFacts, probe
from minisgl.text.tokenizer import MAX_SHORT_CHARS, Tokenizer

# Above the ratio of any natural language or code.
MAX_CHARS_PER_TOKEN = 16
ALWAYS_TAKEN_CHARS = 1 << 20
# Texts and template inputs of up to this size go to the queue of short work: about 10 ms each.
SHORT_BYTES = 16 << 10
# Size of a place; a text occupies one for every started PLACE_BYTES.
PLACE_BYTES = 32 << 10
# Processor time of a rendering; most take some milliseconds. One that needs more is slow, and holds
# up its line no longer than this.
SLOW_SECONDS = 0.15
NUM_SLOW = 4  # slow ones rendered at once
SLOW_NICENESS = 10  # so that they leave the processors to the others, and to the engine
# A drain gives callers this long to submit token ids that they have just received.
SUBMIT_S = 0.1
JOIN_S = 5.0


class Texts:
    """Turns texts and conversations into token ids. Used by the engine's event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        num_places: int,
        make_renderer: Callable[..., Renderer] = Renderer,
    ) -> None:
        """num_places: maximum number of short texts in progress; a long text occupies several. And
        of conversations that wait for what changes them."""
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_chars = max(ALWAYS_TAKEN_CHARS, MAX_CHARS_PER_TOKEN * max_seq_len)
        self._num_places = num_places
        self._num_taken = self._num_inside = 0
        self._changing = Shares(num_places)
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop = asyncio.get_running_loop()
        self._last_left_s = -SUBMIT_S
        make_quick = partial(make_renderer, processor_seconds=SLOW_SECONDS)
        make_slow = partial(make_renderer, niceness=SLOW_NICENESS)
        self._short = WorkQueue(make_quick)
        self._long_renderings = WorkQueue(make_quick)
        self._slow_renderings = WorkQueue(make_slow, NUM_SLOW)
        self._long_texts = WorkQueue(make_quick)  # one at a time, to bound memory
        self._lines = (
            self._short,
            self._long_renderings,
            self._slow_renderings,
            self._long_texts,
        )
        self._ends: list[Future[None]] = []  # of threads
        self._warming: asyncio.Future[None] | None = None
        self._facts: asyncio.Future[TemplateFacts] | None = None

    def warm(self) -> None:
        """Start a rendering process, so that the first conversation does not wait for it."""

        async def start() -> None:
            with contextlib.suppress(Exception):  # the first conversation reports the error
                await self._short.run(Renderer.start, 0)

        self._warming = asyncio.ensure_future(start())

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Tokenize a text.

        Raises ContextLengthError for a text that cannot fit into the context (not with
        `any_length`), TextTooLongError beyond MAX_CHARS_PER_TOKEN, and QueueFullError.
        """
        if len(text) <= MAX_SHORT_CHARS:
            self._last_left_s = self._loop.time()
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        with self._places(len(text)):
            return await self._encode(text, "prompt", add_special_tokens, any_length)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool,
        options: Mapping[str, Any],
        change: Callable[[str], Awaitable[str]] | None = None,
        client: str = "",
    ) -> list[int]:
        """Tokenize a conversation with the model's chat template; raises as `encode` does.

        change: what happens to the rendered conversation before it is tokenized. It may take
        minutes, in which other texts need its places. client: with which others share what there is
        for such conversations.
        """
        call = encode_call(self._tokenizer.template_call(messages, **options))
        with self._inside():
            with self._places(len(call)):
                text = await self._render(call)
                if change is None:
                    return await self._encode(text, "messages", False, any_length)
            text = await self._changed(text, change, client)
            with self._places(len(text)):
                return await self._encode(text, "messages", False, any_length)

    async def _changed(
        self, text: str, change: Callable[[str], Awaitable[str]], client: str
    ) -> str:
        if not self._changing.take(client):
            raise QueueFullError("Too many conversations with images are waiting; try again later.")
        try:
            return await change(text)
        finally:
            self._changing.give_back(client)

    async def template_facts(self) -> TemplateFacts:
        """What the chat template does, found out once. Raises EngineStoppedError."""
        found = self._facts
        if found is None or (found.done() and (found.cancelled() or found.exception())):
            self._facts = found = asyncio.ensure_future(self._find_facts())
        return await asyncio.shield(found)

    async def _find_facts(self) -> TemplateFacts:
        def look(renderer: Renderer, *, gives_up: bool) -> TemplateFacts:
            def rendered(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
                try:
                    call = self._tokenizer.template_call(messages, **options)
                    return renderer.render(encode_call(call))
                except EndlessTemplateError as error:
                    if gives_up:
                        raise TimeoutError from error
                    raise

            return probe(rendered)

        try:  # where the conversations that wait for them are rendered
            return await self._short.run(partial(look, gives_up=True), 0)
        except TimeoutError:
            return await self._slow_renderings.run(partial(look, gives_up=False), 0)

    async def _render(self, call: bytes) -> str:
        def render(renderer: Renderer) -> str:
            return renderer.render(call)

        line = self._short if len(call) <= SHORT_BYTES else self._long_renderings
        try:
            return await line.run(render, len(call))
        except EndlessTemplateError:
            return await self._slow_renderings.run(render, len(call))

    async def _encode(
        self, text: str, param: str, add_special_tokens: bool, any_length: bool
    ) -> list[int]:
        num_chars = self._tokenizer.num_chars(text)  # known without reading the text
        if num_chars > self._max_chars:
            raise TextTooLongError(
                param,
                f"The text has {num_chars} characters; at most {self._max_chars} are taken, which "
                f"is more than sequences of {self._max_seq_len} tokens hold.",
            )
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens=add_special_tokens,
            param=param,
            max_tokens=None if any_length else self._max_seq_len,
        )
        if len(text) <= MAX_SHORT_CHARS:
            return encode()
        line = self._short if len(text) <= SHORT_BYTES else self._long_texts
        return await line.run(lambda _: encode(), len(text))

    @contextlib.contextmanager
    def _places(self, size: int) -> Iterator[None]:
        """Reserve places for a text of `size` bytes. Raises QueueFullError if too few are free,
        except for a text that is alone."""
        num = 1 + size // PLACE_BYTES
        if self._num_taken and self._num_taken + num > self._num_places:
            raise QueueFullError("Too much text is waiting to be tokenized; try again later.")
        self._num_taken += num
        try:
            with self._inside():
                yield
        finally:
            self._num_taken -= num

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Count a caller that `settle` waits for."""
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            self._last_left_s = self._loop.time()
            if not self._num_inside:
                self._empty.set()

    async def settle(self) -> None:
        """Wait until all callers have their token ids and have had time to submit them."""
        while True:
            await self._empty.wait()
            rest_s = self._last_left_s + SUBMIT_S - self._loop.time()
            if rest_s <= 0:
                return
            await asyncio.sleep(rest_s)

    def close(self, reason: MinisglError) -> None:
        """Fail all pending work with `reason`. Idempotent."""
        self.end()
        for line in self._lines:
            line.fail(reason)

    def end(self) -> None:
        """End the threads once the loop has stopped, without failing pending work. Thread-safe."""
        for line in self._lines:
            self._ends += line.end()

    def join(self) -> None:
        """Block until the threads have ended, for a few seconds at most. Call `close` before.

        The interpreter must not exit while the tokenizers library runs in one of them.
        """
        wait(self._ends, JOIN_S)
