"""Decodes and processes images in a process of their own.

What decodes the images of strangers is native code that may fail or take all memory, and that no
thread can interrupt. A process can be killed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np

from minisgl.errors import InvalidRequestError, UnsupportedModelError
from minisgl.images.checkpoint import FILES, CheckpointProcessor, Placeholder
from minisgl.images.decoding import decode
from minisgl.images.limits import PROCESSOR_SECONDS, refuse
from minisgl.images.picture import Picture
from minisgl.subprocesses import MEMORY_BYTES, TIME_IS_UP, Worker, serve_tasks

STOPPED = "The engine was closed before the images were processed."
MAX_REASON_CHARS = 300
WAIT_FACTOR = 6  # so much longer an image may take where processors are busy
NEEDS_PILLOW = "images need Pillow, which is not installed; pip install pillow"


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """Whether a model takes images, and what processes them."""

    folder: Path | None = None  # of the checkpoint, where its processor is
    refusal: str = "the model takes no images."  # without a folder: why it does not

    @classmethod
    def of(cls, folder: Path, *, blind: str = "") -> ImageSupport:
        """What the files of a checkpoint say. blind: why its model takes no images, if so."""
        if blind:
            return cls(refusal=f"the model takes no images: {blind}.")
        if not any((folder / name).is_file() for name in FILES):
            return cls(refusal=f"the checkpoint has no processor for images ({FILES[1]}).")
        if importlib.util.find_spec("PIL") is None:
            return cls(refusal=NEEDS_PILLOW)
        return cls(folder, "")


class Array(msgspec.Struct, array_like=True):
    """An array of NumPy."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Task(msgspec.Struct, array_like=True):
    """An image to process; without data: the placeholder is asked for."""

    data: bytes = b""
    max_pixels: int = 0
    is_low: bool = False
    is_only: bool = True


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Why there is no result."""

    reason: str
    is_model: bool = False  # the checkpoint's processor cannot be used


class Made(msgspec.Struct, tag=True, array_like=True):
    """A processed image."""

    inputs: dict[str, Array]
    token_ids: list[int]
    is_row: Array
    grid: tuple[int, int, int] | None
    num_pixels: int


class Known(msgspec.Struct, tag=True, array_like=True):
    """What stands for an image."""

    placeholder: Placeholder


Answer: TypeAlias = Made | Known | Refused
_ANSWERS = msgspec.msgpack.Decoder(Answer)
_TASKS = msgspec.msgpack.Decoder(Task)


class ImageProcessor(Worker):
    """A process that prepares one image at a time, started when first needed."""

    def __init__(self, folder: Path, seconds: float = PROCESSOR_SECONDS) -> None:
        """folder: of the checkpoint. seconds: of a processor, that an image may take."""
        code = f"from minisgl.images.processor import serve; serve({str(folder)!r}, {seconds!r})"
        super().__init__(code, does="processes images", stopped=STOPPED)

    def placeholder(self) -> Placeholder:
        """What stands for an image in a rendered conversation. Blocks; from the thread that has
        images processed.

        Raises UnsupportedModelError if the checkpoint's processor cannot be used.
        """
        answer = self._asked(Task())
        assert isinstance(answer, Known)
        return answer.placeholder

    def process(
        self,
        data: bytes,
        digest: bytes,
        max_pixels: int,
        *,
        is_low: bool = False,
        is_only: bool = True,
    ) -> tuple[Picture, int]:
        """Decode and process an image; returns it, and its pixels. Blocks, as `placeholder` does.

        digest: see `digest_of`. max_pixels: that it may have. is_only: of its conversation. Raises
        InvalidRequestError, and as `placeholder` does.
        """
        answer = self._asked(Task(data, max_pixels, is_low, is_only))
        assert isinstance(answer, Made)
        picture = Picture(
            digest,
            {name: _array(value) for name, value in answer.inputs.items()},
            tuple(answer.token_ids),
            _array(answer.is_row),
            answer.grid,
        )
        return picture, answer.num_pixels

    def _asked(self, task: Task) -> Answer:
        answer: Answer = _ANSWERS.decode(self.ask(msgspec.msgpack.encode(task)))
        if isinstance(answer, Refused):
            if answer.is_model:
                raise UnsupportedModelError(answer.reason)
            refuse(answer.reason)
        return answer


def digest_of(data: bytes, fingerprint: str, *, is_low: bool, is_only: bool = True) -> bytes:
    """The digest of an image for a processor with this fingerprint."""
    hashed = blake2b(digest_size=32)
    form = (b"low" if is_low else b"") + (b"" if is_only else b" of several")
    for each in (fingerprint.encode(), form, data):
        hashed.update(len(each).to_bytes(8, "little"))
        hashed.update(each)
    return hashed.digest()


def serve(folder: str, seconds: float) -> NoReturn:
    """Run the process: answer tasks until its parent has gone."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork
    loaded = load(Path(folder))

    def ended(number: int) -> bytes:
        if number in TIME_IS_UP:
            return _encoded(
                Refused(f"takes longer than {seconds:g} s to process; send a smaller one.")
            )
        return _encoded(Refused("cannot be decoded; send it in another format."))

    serve_tasks(
        tasks,
        answers,
        lambda task: answer(loaded, task),
        lambda number: None if number == signal.SIGKILL else ended(number),
        {signal.ITIMER_PROF: seconds, signal.ITIMER_REAL: WAIT_FACTOR * seconds},
    )


def load(folder: Path) -> CheckpointProcessor | Refused:
    """The processor, and all that it loads when it is used."""
    try:
        return CheckpointProcessor(folder)
    except UnsupportedModelError as error:
        reason = str(error)
    except Exception as error:  # broken files, and packages that are missing, raise many types
        reason = _about_torchvision(error) or str(error) or type(error).__name__
    return Refused(reason[:MAX_REASON_CHARS], is_model=True)


def _about_torchvision(error: BaseException | None) -> str | None:
    """What an error says of torchvision, which transformers uses wherever it is installed."""
    while error is not None and "torchvision" not in str(error).lower():
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    if importlib.util.find_spec("torchvision") is None:
        return "its processor needs the package torchvision, which is not installed."
    return "torchvision is of another release than torch, and cannot be used; install that of it."


def answer(loaded: CheckpointProcessor | Refused, task: bytes) -> bytes:
    """What the process answers to a task."""
    return _encoded(_answer(loaded, _TASKS.decode(task)))


def _answer(loaded: CheckpointProcessor | Refused, task: Task) -> Answer:
    if isinstance(loaded, Refused):
        return loaded
    if not task.data:
        return Known(loaded.placeholder)
    try:
        image, num_pixels = decode(task.data, task.max_pixels, is_low=task.is_low)
        made = loaded.process(image, is_only=task.is_only)
    except InvalidRequestError as error:
        return Refused(str(error.args[0]).removeprefix("an image "))
    except Exception as error:  # of code of transformers, for a shape that the model does not take
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch says it
            most = f"{MEMORY_BYTES >> 20} MiB of memory"
            return Refused(f"takes more than {most} to process; send a smaller one.")
        return Refused(f"is refused by the model's processor: {str(error)[:MAX_REASON_CHARS]}")
    inputs = {name: _plain(value) for name, value in made.inputs.items()}
    return Made(inputs, made.token_ids, _plain(made.is_row), made.grid, num_pixels)


def _encoded(answer: Answer) -> bytes:
    return msgspec.msgpack.encode(answer)


def _plain(array: Any) -> Array:
    array = np.ascontiguousarray(array)
    return Array(array.dtype.str, array.shape, memoryview(array).cast("B"))


def _array(plain: Array) -> Any:
    """The array, which owns its memory and may be written to: torch asks for that."""
    return np.frombuffer(plain.data, dtype=plain.dtype).reshape(plain.shape).copy()
