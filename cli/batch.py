"""`minisgl batch`: answers a file of requests, as OpenAI's Batch API has them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minisgl.client.remote import RemoteConfig
from minisgl.config import EngineConfig, check_at_least, option, refuse_engine_options
from minisgl.errors import ConfigError
from minisgl.printable import counted, printable

from .logs import set_up_logging
from .options import takes_options

if TYPE_CHECKING:  # which --help does without
    from .batch_file import BatchRequest
    from .batch_post import Post


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(RemoteConfig):
    """The options as the user gave them. Raises ConfigError for an invalid value."""

    max_concurrency: int = option(256, "Requests at once at most.", group="Batch")
    image_folder: str = option(
        "", "Folder below which images of requests may be paths.", group="Batch"
    )

    def __post_init__(self) -> None:
        RemoteConfig.__post_init__(self)
        check_at_least(self, "max_concurrency", 1)
        if self.image_folder and not os.path.isdir(self.image_folder):
            raise ConfigError("--image-folder", self.image_folder, "allowed: a folder")


@takes_options
def batch(
    batch: BatchConfig,
    engine: EngineConfig,
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="A request a line: custom_id, url, body.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="An answer a line; a later run goes on.")
    ],
) -> int:
    """Answer a file of requests, as OpenAI's Batch API has them.

    \b
      minisgl batch in.jsonl out.jsonl --model Qwen/Qwen3-0.6B
      minisgl batch in.jsonl out.jsonl --url http://127.0.0.1:1919
    """
    if batch.url:
        refuse_engine_options(engine)
    _check_files(source, target)
    set_up_logging()
    from .batch_file import answers_in, described, read_requests

    requests, bad = read_requests(source)
    for said in described(bad):
        print(f"minisgl: {source}: {printable(said)}", file=sys.stderr)
    with answers_in(target, {request.custom_id for request in requests}) as (add, done):
        left = [request for request in requests if request.custom_id not in done]
        began = time.monotonic()
        num_failed = asyncio.run(_answer_all(batch, engine, left, add)) if left else 0
    num_kept = sum(done.get(request.custom_id, 200) != 200 for request in requests)
    num_failed += num_kept
    skipped = len(requests) - len(left)
    print(
        f"minisgl: {counted(len(requests), 'request')}, {num_failed:,} failed, "
        f"{counted(len(bad), 'bad line')}; "
        f"{len(left):,} asked in {time.monotonic() - began:.1f} s, {skipped:,} answered before",
        file=sys.stderr,
    )
    if num_kept:
        print(
            f"minisgl: {num_kept:,} of the failed were refused before and are not asked again; "
            f"take their lines out of {printable(str(target))} to ask them anew",
            file=sys.stderr,
        )
    return 1 if num_failed or bad else 0


def _check_files(source: Path, target: Path) -> None:
    for name, file in (("IN.jsonl", source), ("OUT.jsonl", target)):
        # Both are read from their beginning, and OUT is cut, which a pipe or a device is not.
        if os.path.exists(file) and not os.path.isfile(file):
            raise ConfigError(name, file, "is not a regular file; allowed: one, or a link to one")
    if os.path.exists(source) and os.path.exists(target) and target.samefile(source):
        raise ConfigError("OUT.jsonl", target, "allowed: another file than the requests'")


async def _answer_all(
    batch: BatchConfig,
    engine: EngineConfig,
    requests: Sequence[BatchRequest],
    add: Callable[[bytes], None],
) -> int:
    """Add a line for each request as it is answered. Returns the number of failures.

    Raises MinisglError if the engine does not start, or if a line cannot be added.
    """
    from minisgl.progress import LoadProgress

    from .batch_file import Failure, answer_line
    from .batch_post import patient

    waiting = iter(requests)
    num_done = num_failed = 0

    async with _opened(batch, engine) as post:
        if batch.image_folder:
            from .batch_images import with_images

            post = with_images(post, Path(batch.image_folder))
        post = patient(post)
        with LoadProgress() as progress:
            progress("answering", 0.0)

            async def answer_some() -> None:
                nonlocal num_done, num_failed
                for request in waiting:  # which all of these share
                    result = await post(request)
                    num_done += 1
                    num_failed += isinstance(result, Failure) or result.status_code != 200
                    add(answer_line(request, result))
                    progress("answering", num_done / len(requests))

            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(batch.max_concurrency, len(requests))):
                        tasks.create_task(answer_some())
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
    return num_failed


@asynccontextmanager
async def _opened(batch: BatchConfig, engine: EngineConfig) -> AsyncIterator[Post]:
    """What answers the requests."""
    from .batch_post import own_application, server_at

    if batch.url:
        yield server_at(batch.url, batch.find_key(), batch.request_timeout)
        return
    async with own_application(engine) as post:
        yield post
