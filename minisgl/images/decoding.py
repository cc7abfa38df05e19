"""Decodes images of strangers, in the process that may fail at it."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from minisgl.images.limits import (
    FORMAT_NAMES,
    FORMATS,
    LOW_SIDE,
    MAX_PIXELS,
    MAX_REQUEST_PIXELS,
    PARAM,
    TooManyImagesError,
    refuse,
)

if TYPE_CHECKING:
    from PIL.Image import Image

DAMAGED = "is damaged or incomplete; send all of its file."
MAX_16_BITS = (1 << 16) - 1


def decode(data: bytes, max_pixels: int, *, is_low: bool) -> tuple[Image, int]:
    """An image in RGB as people see it, and the number of its pixels before any reduction.

    max_pixels: that it may have here; at most MAX_PIXELS. Raises InvalidRequestError, before
    anything is decoded where the header says enough.
    """
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        image = _opened(data)
        num_pixels = image.width * image.height
        if num_pixels > max_pixels:
            size = f"has {image.width} × {image.height} pixels"
            limits = f"{MAX_PIXELS:,} an image and {MAX_REQUEST_PIXELS:,} a request"
            reason = f"{size}, which is too many; allowed: {limits}."
            if num_pixels <= MAX_PIXELS:
                raise TooManyImagesError(PARAM, f"an image {reason}")
            refuse(reason)
        try:
            # Cameras store a second picture behind the first one (MPO), which is no animation.
            animated = getattr(image, "is_animated", False) and image.format != "MPO"
            image.load()
            seen = None if animated else _as_seen(image, is_low)
        except MemoryError:
            raise
        except Exception:
            refuse(DAMAGED)
        if seen is None:
            refuse(f"is animated; allowed: {FORMAT_NAMES}.")
        return seen, num_pixels


def _opened(data: bytes) -> Image:
    """An image of which only the header was read."""
    import PIL.Image

    try:
        return PIL.Image.open(BytesIO(data), formats=FORMATS)
    except PIL.UnidentifiedImageError:
        refuse(f"has no format that is known; allowed: {FORMAT_NAMES}.")
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        refuse(f"has too many pixels; allowed: {MAX_PIXELS:,} an image.")
    except Exception:  # what the parsers of formats raise for a header that is none
        refuse(DAMAGED)


def turn_upright(image: Image) -> None:
    """Turn an image, in place, as its EXIF says."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        # EXIF that cannot be read says nothing about the orientation. Where it can, the image is
        # upright before Pillow writes the EXIF again, which fails for odd tags.
        pass


def _as_seen(image: Image, is_low: bool) -> Image:
    """The image upright, over white, and in RGB."""
    import PIL.Image

    turn_upright(image)
    if image.mode.startswith("I"):  # grey of 16 bits, which Pillow cuts off at 255
        grey = np.asarray(image).clip(0, MAX_16_BITS)
        shown = np.where(grey == image.info.get("transparency", -1), MAX_16_BITS, grey) >> 8
        seen = PIL.Image.fromarray(shown.astype(np.uint8)).convert("RGB")
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        seen = PIL.Image.new("RGB", layer.size, "white")
        seen.paste(layer, mask=layer.getchannel("A"))
    else:
        seen = image if image.mode == "RGB" else image.convert("RGB")
    if is_low:
        seen.thumbnail((LOW_SIDE, LOW_SIDE))
    return seen
