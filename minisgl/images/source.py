"""Where an image of a message comes from, before anything is fetched or decoded."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from minisgl.errors import InvalidRequestError
from minisgl.images.limits import (
    MAX_BYTES,
    MAX_IMAGES,
    PARAM,
    TooManyImagesError,
    check_size,
    refuse,
)

# The type of a message's part that has one, as its "source". Templates know this type, too.
IMAGE_PART = "image"
MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
FORMS = "data:image/png;base64,... (or jpeg, webp, gif) and http(s) addresses"
MAX_URL_CHARS = 4096
HEAD_CHARS = 256  # of a data URL, in front of its data
MAX_TEXT_CHARS = 2 * MAX_BYTES  # of base64, with any white space in it
WHITE_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request: its bytes, as in a file, or the address where they are."""

    data: bytes = b""
    url: str = ""  # http or https; "": there are `data`
    is_low: bool = False  # it is reduced before anything else ("detail": "low")
    field: str = PARAM  # of the request that has it

    @classmethod
    def of_url(cls, url: str, *, is_low: bool = False) -> ImageSource:
        """The image of a `data:` URL, or at an http(s) address, which is not looked at yet.

        Raises InvalidRequestError.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return cls(_data_of(url[len("data:") :]), is_low=is_low)
        if scheme not in ("http", "https"):
            refuse(f"has an address that is not supported; allowed: {FORMS}.")
        if len(url) > MAX_URL_CHARS:
            refuse(f"has an address of {len(url)} characters; allowed: {MAX_URL_CHARS}.")
        return cls(url=url, is_low=is_low)


@contextmanager
def named(source: ImageSource) -> Iterator[None]:
    """Errors about an image name its field."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = source.field
        raise


def sources_of(messages: Sequence[Mapping[str, Any]]) -> list[ImageSource]:
    """The images of a conversation in their order. Raises InvalidRequestError."""
    sources = list(_sources(messages))
    if len(sources) > MAX_IMAGES:
        raise TooManyImagesError(
            PARAM, f"have {len(sources)} images; allowed: {MAX_IMAGES} a request."
        )
    return sources


def _sources(messages: Sequence[Mapping[str, Any]]) -> Iterator[ImageSource]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == IMAGE_PART:
                source = part.get("source")
                if not isinstance(source, ImageSource):
                    raise InvalidRequestError(
                        PARAM, 'a part of type "image" must have an ImageSource as its "source".'
                    )
                if not source.url and not source.data:
                    with named(source):
                        check_size(0)
                yield source


def _data_of(rest: str) -> bytes:
    """The bytes of a data URL, without its scheme."""
    head, comma, _ = rest[:HEAD_CHARS].partition(",")
    media_type, *parameters = head.split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        refuse(f"has a data URL that is not in base64; allowed: {FORMS}.")
    text = rest[len(head) + 1 :]
    if "%" in text[-9:]:  # some quote the padding
        text = text[:-9] + unquote(text[-9:])
    return _decoded(text, media_type)


def _decoded(text: str, media_type: str) -> bytes:
    if media_type.strip().lower() not in MEDIA_TYPES:
        refuse(f"has a media type that is not supported; allowed: {', '.join(MEDIA_TYPES)}.")
    if len(text) > MAX_TEXT_CHARS:
        check_size(len(text))
    try:
        # Of bytes: str.split would make millions of strings on the event loop.
        data = base64.b64decode(text.encode("ascii").translate(None, WHITE_SPACE), validate=True)
    except (binascii.Error, ValueError):
        refuse("is not valid base64; allowed: the standard alphabet, with its padding.")
    check_size(len(data))
    return data
