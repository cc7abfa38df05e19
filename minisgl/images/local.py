"""The images of programs on this machine: images of Pillow, bytes and files beside addresses."""

from __future__ import annotations

import io
import os
import re
import stat
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.errors import InvalidRequestError
from minisgl.images.decoding import MAX_16_BITS, turn_upright
from minisgl.images.limits import FORMAT_NAMES, MAX_BYTES, check_size, refuse
from minisgl.images.source import IMAGE_PART, ImageSource

ADDRESSES = ("data:", "http://", "https://")
# How files begin, by their types.
MARKS = {
    "png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "jpeg": re.compile(rb"\xff\xd8\xff"),
    "webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "gif": re.compile(rb"GIF8[79]a"),
}
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
TRANSPARENT_MODES = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}  # and what keeps as much of them
FORMS = (
    'must be {"type": "image", "image": ...} with an image of Pillow, bytes or a path, or '
    '{"type": "image_url", "image_url": {"url": ...}} with an address or a path.'
)


class ImageFileError(InvalidRequestError):
    """A file cannot be read as an image. It says so without a field, whose path it is."""

    def __str__(self) -> str:
        return str(self.args[0])


def is_address(text: str) -> bool:
    return text.lower().startswith(ADDRESSES)


def read_image(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that may be an image. Blocks. Raises ImageFileError."""
    shown = os.fspath(path)
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ImageFileError("messages", f"{shown} is not a file.")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ImageFileError("messages", f"{shown} cannot be read: {reason}.") from error
    if not data or len(data) > MAX_BYTES:
        limit = f"{shown} has no bytes" if not data else f"{shown} is larger than an image may be"
        raise ImageFileError(
            "messages", f"{limit}; allowed: {FORMAT_NAMES}, up to {MAX_BYTES >> 20} MiB."
        )
    return data


def _at_once(path: str, flags: int) -> int:
    """Open a file, without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def address_of(path: str | os.PathLike[str]) -> str:
    """The `data:` address of an image in a file. Blocks. Raises ImageFileError."""
    data = read_image(path)
    kind = next((kind for kind, mark in MARKS.items() if mark.match(data)), None)
    if kind is None:
        shown = os.fspath(path)
        raise ImageFileError("messages", f"{shown} is not an image; allowed: {FORMAT_NAMES}.")
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def with_sources(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, where each part with an image has its source. Raises InvalidRequestError."""
    return [_with_sources(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _with_sources(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [_part(part, f"{path}.content[{at}]") for at, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, path: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in (IMAGE_PART, "image_url"):
        return part
    try:
        return {"type": IMAGE_PART, "source": replace(_source(part), field=path)}
    except InvalidRequestError as error:
        error.param = path
        raise


def _source(part: Mapping[str, Any]) -> ImageSource:
    match part:
        case {"source": ImageSource() as source}:
            return source
        case {"type": "image_url", "image_url": {"url": str(url), **others}}:
            is_low = others.get("detail") == "low"
            if is_address(url):
                return ImageSource.of_url(url, is_low=is_low)
            return ImageSource(read_image(url), is_low=is_low)
        case {"type": "image", "image": bytes() | bytearray() | memoryview() as data}:
            data = bytes(data)
            check_size(len(data))
            return ImageSource(data)
        case {"type": "image", "image": str() | os.PathLike() as file}:
            return ImageSource(read_image(Path(file)))
        case {"type": "image", "image": image} if hasattr(image, "save") and hasattr(image, "mode"):
            return ImageSource(_as_png(image))
    raise InvalidRequestError("messages", FORMS)


def _as_png(image: Any) -> bytes:
    """An image of Pillow as a file, upright, and without loss."""
    file = io.BytesIO()
    try:
        image = image.copy()  # the caller's stays as it is
        turn_upright(image)
        if image.mode not in PNG_MODES:
            image = _of_png_mode(image)
        image.save(file, "PNG", compress_level=1)
    except (ValueError, OSError) as error:  # OSError: the file that it is read from
        refuse(f"of Pillow cannot be used: {error}.")
    return file.getvalue()


def _of_png_mode(image: Any) -> Any:
    if image.mode.startswith("I"):  # of more bits than 8, at which Pillow cuts them off
        from PIL import Image

        return Image.fromarray(np.asarray(image).clip(0, MAX_16_BITS).astype(np.uint16))
    return image.convert(TRANSPARENT_MODES.get(image.mode, "RGB"))
