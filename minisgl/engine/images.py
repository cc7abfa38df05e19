"""Makes prompts of conversations with images, before they reach the engine.

Images are fetched, decoded and processed while the conversation is rendered. What a template writes
for each image is then replaced by the tokens that the checkpoint's processor has made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minisgl.config.machine import memory_bytes
from minisgl.engine.texts import JOIN_S, Texts
from minisgl.engine.work_queue import WorkQueue
from minisgl.errors import InvalidRequestError, MinisglError, QueueFullError, UnsupportedModelError
from minisgl.images.checkpoint import Placeholder
from minisgl.images.fetching import Fetcher
from minisgl.images.kept import KeptPictures
from minisgl.images.limits import (
    MAX_PIXELS,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_PIXELS,
    PARAM,
    TooManyImagesError,
)
from minisgl.images.picture import Picture, check_rows, with_pictures
from minisgl.images.processor import ImageProcessor, ImageSupport, digest_of
from minisgl.images.prompt import Prompt
from minisgl.images.source import IMAGE_PART, ImageSource, named, sources_of
from minisgl.parts.images.host import Pictured
from minisgl.places import Places, Shares
from minisgl.request import EVERYONE, Tenant, cache_namespace
from minisgl.text.tokenizer import Tokenizer

NUM_PROCESSES = 2
MAX_WAITING_BYTES = 1 << 30  # of images of all requests that are not processed yet
NUM_FETCHES = 32  # at once; others wait
NUM_DIGESTS = 2  # the same
# Of this machine's memory, that requests in the queue or running may have for what the tower takes.
MEMORY_SHARE = 0.25
LONG_BYTES = 256 << 10  # whose digest is not computed on the event loop


@dataclass(frozen=True, slots=True)
class _Sender:
    """Whose images they are, and with which requests they share what was processed."""

    tenant: Tenant
    namespace: bytes


class Images:
    """Turns conversations with images into prompts. Used by the engine's event loop only."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        support: ImageSupport,
        fetcher: Fetcher,
        make_processor: Callable[[Path], ImageProcessor] | None = None,
    ) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._support = support
        self._fetcher = fetcher
        self._kept = KeptPictures()
        self._waiting_bytes = Shares(MAX_WAITING_BYTES)
        # What an image takes, one after the other.
        self._fetching = Places(NUM_FETCHES)
        self._digesting = Places(NUM_DIGESTS)
        self._processing = Places(NUM_PROCESSES)
        self._placeholder: Placeholder | None = None
        self._line: WorkQueue[ImageProcessor] | None = None
        if support.folder is not None:
            make = make_processor or partial(ImageProcessor, dtype=support.dtype)
            self._line = WorkQueue(partial(make, support.folder), NUM_PROCESSES)
        self._ends: list[Future[None]] = []  # of threads
        self._warming: asyncio.Future[list[None]] | None = None

    def warm(self) -> None:
        """Start the processes if the model takes images, so that none of these waits for one."""

        async def start(line: WorkQueue[ImageProcessor]) -> None:
            with contextlib.suppress(Exception):  # the first image reports the error
                await line.run(lambda processor: processor.start(), 0)

        if self._line is not None:
            self._warming = asyncio.gather(*[start(self._line) for _ in range(NUM_PROCESSES)])

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool,
        options: Mapping[str, Any],
        cache_salt: str | None = None,
        tenant: Tenant = EVERYONE,
    ) -> Prompt:
        """Tokenize a conversation that may have images; raises as `AsyncEngine.encode` does.

        Clients take turns. Processed images are shared as prefixes are: the time of an image tells
        that it was processed before."""
        sources = sources_of(messages)
        if sources and self._line is None:
            raise InvalidRequestError(PARAM, self._support.refusal)
        # Only templates that know images want parts, also where the text part runs alone.
        if IMAGE_PART in self._tokenizer.chat_template_text:
            facts = await self._texts.template_facts()
            if facts.wants_parts:
                options = {**options, "content_in_parts": True}
        if self._line is None or not sources:
            return Prompt(await self._texts.chat(messages, any_length, options))
        placeholder = await self._find_placeholder(self._line)
        sender = _Sender(tenant, cache_namespace(tenant, cache_salt))
        making = asyncio.ensure_future(self._pictures(self._line, sources, placeholder, sender))
        # It may fail for a conversation that cannot be rendered, which is told alone.
        making.add_done_callback(lambda made: made.cancelled() or made.exception())
        try:
            return await self._with_pictures(
                messages, any_length, options, placeholder, making, tenant.client
            )
        finally:
            making.cancel()

    async def _with_pictures(
        self,
        messages: Sequence[Mapping[str, Any]],
        any_length: bool,
        options: Mapping[str, Any],
        placeholder: Placeholder,
        making: asyncio.Future[list[Picture]],
        client: str,
    ) -> Prompt:
        opening: list[int] = []

        async def placed(rendered: str) -> str:
            """The rendered conversation, with all that is around the tokens of an image."""
            pictures = await making
            found = self._tokenizer.count_control(rendered, placeholder.text)
            if found != len(pictures):
                raise _misplaced(found, len(pictures))
            opening.extend(self._tokenizer.opening(rendered))
            return self._tokenizer.surround_control(
                rendered, placeholder.text, placeholder.before, placeholder.after
            )

        token_ids = await self._texts.chat(messages, any_length, options, placed, client)
        try:
            prompt, spans = with_pictures(
                [*opening, *token_ids], placeholder.token_id, await making
            )
        except ValueError:
            found = token_ids.count(placeholder.token_id)
            raise _misplaced(found, len(making.result())) from None
        if self._support.num_rows is not None and not any_length:
            check_rows([span.picture for span in spans], self._support.num_rows)
        return Prompt(prompt, spans, [Pictured(spans)])

    async def _find_placeholder(self, line: WorkQueue[ImageProcessor]) -> Placeholder:
        if self._placeholder is None:
            with _told():
                self._placeholder = await line.run(ImageProcessor.placeholder, 0)
        return self._placeholder

    async def _pictures(
        self,
        line: WorkQueue[ImageProcessor],
        sources: Sequence[ImageSource],
        placeholder: Placeholder,
        sender: _Sender,
    ) -> list[Picture]:
        """The images of a request. One after the other, since each leaves the next less room."""
        is_only = len(sources) == 1 or not placeholder.counts_images
        with self._room(sender.tenant.client) as take:
            take(sum(len(source.data) for source in sources))
            addressed = [source for source in sources if source.url]
            rest = iter(await _all([self._fetch(each, take, sender.tenant) for each in addressed]))
            pictures, room = [], MAX_REQUEST_PIXELS
            for source in sources:
                data = next(rest) if source.url else source.data
                found = await self._picture(line, data, source, placeholder, room, is_only, sender)
                pictures.append(found[0])
                room -= found[1]
            return pictures

    async def _fetch(
        self, source: ImageSource, take: Callable[[int], None], tenant: Tenant
    ) -> bytes:
        async with self._fetching.place(tenant):
            with named(source):
                data = await self._fetcher.fetch(source.url)
        take(len(data))
        return data

    async def _picture(
        self,
        line: WorkQueue[ImageProcessor],
        data: bytes,
        source: ImageSource,
        placeholder: Placeholder,
        room: int,
        is_only: bool,
        sender: _Sender,
    ) -> tuple[Picture, int]:
        """An image, and its pixels, of which there may be as many as `room`. is_only: of its
        conversation, where that matters."""
        form = {"is_low": source.is_low, "is_only": is_only}
        work = partial(digest_of, data, placeholder.fingerprint, **form)
        if len(data) < LONG_BYTES:
            digest = work()
        else:
            async with self._digesting.place(sender.tenant):
                digest = await asyncio.to_thread(work)
        key = sender.namespace + digest

        def process(processor: ImageProcessor) -> tuple[Picture, int]:
            # Another request may have had it processed while this one waited.
            kept = self._kept.get(key)
            if kept is None or kept[1] > room:
                kept = processor.process(data, digest, min(MAX_PIXELS, room), **form)
                self._kept.put(key, *kept)
            return kept

        found = self._kept.get(key)
        if found is None or found[1] > room:
            if self._kept.num_other_bytes > MEMORY_SHARE * memory_bytes():
                raise QueueFullError("Too many images are in the queue; try again later.")
            async with self._processing.place(sender.tenant):
                with _told(), named(source):
                    # In order of turns: an image of many bytes takes no longer than others.
                    found = await line.run(process, 0)
        return found

    @contextlib.contextmanager
    def _room(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yields what takes bytes of a request into account as they come. It raises
        TooManyImagesError if they are too many, QueueFullError if those of all requests are."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if taken + num_bytes > MAX_REQUEST_BYTES:
                raise TooManyImagesError(
                    PARAM,
                    f"have images of {taken + num_bytes:,} bytes; allowed: {MAX_REQUEST_BYTES:,} a "
                    "request.",
                )
            if not self._waiting_bytes.take(client, num_bytes):
                raise QueueFullError(
                    "Too many images are waiting to be processed; try again later."
                )
            taken += num_bytes

        try:
            yield take
        finally:
            self._waiting_bytes.give_back(client, taken)

    def close(self, reason: MinisglError) -> None:
        """Fail all pending work with `reason`. Idempotent."""
        self.end()
        if self._line is not None:
            self._line.fail(reason)
        for places in (self._fetching, self._digesting, self._processing):
            places.fail(reason)

    def end(self) -> None:
        """End the threads, without failing pending work. Thread-safe."""
        if self._line is not None:
            self._ends += self._line.end()

    def join(self) -> None:
        """Block until the threads have ended, for a few seconds at most. Call `close` before."""
        wait(self._ends, JOIN_S)


async def _all(fetches: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """All results; the others are cancelled when one fails."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch) for fetch in fetches]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell a caller who sends images that the checkpoint's processor cannot be used."""
    try:
        yield
    except UnsupportedModelError as error:
        raise InvalidRequestError(
            PARAM, f"have images, which cannot be processed for this model: {error}"
        ) from error


def _misplaced(found: int, num_images: int) -> InvalidRequestError:
    return InvalidRequestError(
        PARAM,
        f"have {num_images} images, for which the model's chat template has written {found} "
        "placeholders; allowed: images in messages of users, and no placeholders in texts.",
    )
