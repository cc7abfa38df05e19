"""Has images decoded and processed in a process of their own (models/towers/processing.py).

What decodes the images of strangers is native code that may fail or take all memory, and that no
thread can interrupt. A process can be killed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from minisgl.errors import UnsupportedModelError
from minisgl.images.checkpoint import FILES, Placeholder
from minisgl.images.limits import PARAM, PROCESSOR_SECONDS, TooManyImagesError, refuse
from minisgl.images.picture import Picture
from minisgl.subprocesses import Worker

PROCESS = "minisgl.models.towers.processing"  # the module of the other side
STOPPED = "The engine was closed before the images were processed."
NEEDS_PILLOW = "images need Pillow, which is not installed; pip install pillow"


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """Whether a model takes images, and what processes them."""

    folder: Path | None = None  # of the checkpoint, where its processor is
    refusal: str = "the model takes no images."  # without a folder: why it does not
    dtype: str = "float32"  # in which the tower takes pixels
    num_rows: int | None = None  # that the images of a request may have; None: any number

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        blind: str = "",
        dtype: str = "float32",
        num_rows: int | None = None,
    ) -> ImageSupport:
        """What the files of a checkpoint say. blind: why its model takes no images, if so."""
        if blind:
            return cls(refusal=f"the model takes no images: {blind}.")
        if not any((folder / name).is_file() for name in FILES):
            return cls(refusal=f"the checkpoint has no processor for images ({FILES[1]}).")
        if importlib.util.find_spec("PIL") is None:
            return cls(refusal=NEEDS_PILLOW)
        return cls(folder, "", dtype, num_rows)


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
    dtype: str = "float32"


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Why there is no result."""

    reason: str
    is_model: bool = False  # the checkpoint's processor cannot be used
    is_rest: bool = False  # without the images before it, the request may have the image


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


class ImageProcessor(Worker):
    """A process that prepares one image at a time, started when first needed."""

    def __init__(
        self, folder: Path, dtype: str = "float32", seconds: float = PROCESSOR_SECONDS
    ) -> None:
        """folder: of the checkpoint. dtype: to which pixels are rounded. seconds: of a processor,
        that an image may take."""
        self._dtype = dtype
        code = f"from {PROCESS} import serve; serve({str(folder)!r}, {seconds!r})"
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
        answer = self._asked(Task(data, max_pixels, is_low, is_only, self._dtype))
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
            if answer.is_rest:
                raise TooManyImagesError(PARAM, f"an image {answer.reason}")
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


def _array(plain: Array) -> Any:
    return np.frombuffer(plain.data, dtype=plain.dtype).reshape(plain.shape)
