"""How large images of requests may be. Errors name these limits."""

from __future__ import annotations

from typing import NoReturn

from minisgl.errors import InvalidRequestError

PARAM = "messages"  # the field of a request that errors name; who knows its name better changes it
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # as Pillow names them
FORMAT_NAMES = "PNG, JPEG, WebP and GIF of one frame"
MAX_IMAGES = 16  # of a request
MAX_BYTES = 16 << 20  # of an image, as in a file
MAX_REQUEST_BYTES = 64 << 20
MAX_PIXELS = 32_000_000  # of an image
MAX_REQUEST_PIXELS = 64_000_000
LOW_SIDE = 512  # pixels: an image is reduced to fit into such a square ("detail": "low")
PROCESSOR_SECONDS = 10.0  # of a processor, that decoding and processing of an image may take


class TooManyImagesError(InvalidRequestError):
    """The images of a request are too many, or too large together; fewer of them may be taken."""


def refuse(reason: str) -> NoReturn:
    """Raise InvalidRequestError for an image. reason: the rest of a sentence about it."""
    raise InvalidRequestError(PARAM, f"an image {reason}")


def check_size(num_bytes: int) -> None:
    """Raise InvalidRequestError for the bytes of an image that are none, or too many."""
    if not num_bytes:
        refuse(f"is empty; allowed: {FORMAT_NAMES}.")
    if num_bytes > MAX_BYTES:
        refuse(f"has more than {MAX_BYTES >> 20} MiB; allowed: {MAX_BYTES >> 20} MiB an image.")
