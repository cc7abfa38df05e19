"""Where an image of a message comes from, before anything is fetched or decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request: its bytes, as in a file, or the address where they are."""

    data: bytes = b""
    url: str = ""  # http or https; "": there are `data`
    is_low: bool = False  # it is reduced before anything else ("detail": "low")


# The type of a message's part that has one, as its "source". Templates know this type, too.
IMAGE_PART = "image"
