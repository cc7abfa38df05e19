"""The images of programs on this machine."""

from __future__ import annotations

import io
import os
import struct
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minisgl.errors import InvalidRequestError
from minisgl.images.decoding import decode
from minisgl.images.limits import MAX_BYTES, MAX_PIXELS
from minisgl.images.local import address_of, with_sources
from minisgl.images.source import ImageSource, sources_of


def png(mode: str = "RGB", size: tuple[int, int] = (2, 3)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


def source_of(part: dict[str, Any]) -> ImageSource:
    [message] = with_sources([{"role": "user", "content": [part, {"type": "text", "text": "x"}]}])
    found, text = message["content"]
    assert found["type"] == "image" and text == {"type": "text", "text": "x"}
    assert found["source"].field == "messages[0].content[0]"
    return replace(found["source"], field="messages")


def test_an_image_is_bytes_a_path_or_an_address(tmp_path: Path) -> None:
    data, file = png(), tmp_path / "image.png"
    file.write_bytes(data)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    for given in (data, bytearray(data), memoryview(data), file, str(file)):
        assert source_of({"type": "image", "image": given}) == ImageSource(data)
    for address in (url, str(file)):
        part = {"type": "image_url", "image_url": {"url": address, "detail": "low"}}
        assert source_of(part) == ImageSource(data, is_low=True)
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.org/x"}}
    assert source_of(elsewhere).url == "https://example.org/x"
    assert source_of({"type": "image", "source": ImageSource(data)}) == ImageSource(data)
    assert address_of(file) == url


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "F"])
def test_an_image_of_pillow_becomes_a_file_of_the_same_pixels(mode: str) -> None:
    image = Image.new(mode, (4, 5))
    found = Image.open(io.BytesIO(source_of({"type": "image", "image": image}).data))
    assert found.size == (4, 5)
    assert found.convert("RGB").tobytes() == image.convert("RGB").tobytes()


def decoded(image: Image.Image) -> Image.Image:
    source = source_of({"type": "image", "image": image})
    return decode(source.data, MAX_PIXELS, is_low=False)[0]


@pytest.mark.parametrize("odd", [False, True])
def test_an_image_of_pillow_is_turned_upright(odd: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation
    kept = exif.tobytes()
    if odd:  # of another type than the tag has
        tags = struct.pack("<HHLf", 0x010F, 11, 1, 1.0) + struct.pack("<HHLHH", 0x0112, 3, 1, 6, 0)
        kept = b"Exif\x00\x00II*\x00" + struct.pack("<LH", 8, 2) + tags + bytes(4)
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "JPEG", exif=kept)
    image = Image.open(file)
    assert decoded(image).size == (2, 4)
    assert image.size == (4, 2) and image.getexif()[0x0112] == 6


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_what_is_transparent_stays_so(mode: str) -> None:
    assert decoded(Image.new(mode, (2, 2))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B", "I;16L"])
def test_grey_of_more_bits_than_8_keeps_its_shades(mode: str) -> None:
    assert decoded(Image.new(mode, (2, 2), 0x8000)).getpixel((0, 0)) == (128, 128, 128)


def test_grey_beyond_16_bits_is_cut_off() -> None:
    assert decoded(Image.new("I", (2, 2), 1 << 20)).getpixel((0, 0)) == (255, 255, 255)
    assert decoded(Image.new("I", (2, 2), -5)).getpixel((0, 0)) == (0, 0, 0)


def test_an_image_of_pillow_may_take_more_bytes_than_a_file() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2400, 2400, 3), dtype=np.uint8)
    content = [{"type": "image", "image": Image.fromarray(noise)}]
    [source] = sources_of(with_sources([{"role": "user", "content": content}]))
    assert len(source.data) > MAX_BYTES


def test_images_without_bytes_or_pixels_are_refused() -> None:
    cut = io.BytesIO(png(size=(90, 90))[:-30])
    for image, words in (
        (b"", "is empty; allowed"),
        (ImageSource(), "is empty; allowed"),
        (bytes(MAX_BYTES + 1), "allowed: 16 MiB an image"),
        (Image.new("RGB", (0, 5)), "of Pillow cannot be used: cannot write empty image"),
        (Image.open(cut), "of Pillow cannot be used"),
    ):
        part = {"type": "image", "source" if isinstance(image, ImageSource) else "image": image}
        with pytest.raises(InvalidRequestError, match=words) as caught:
            sources_of(with_sources([{"role": "user", "content": [part]}]))
        assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": 5},
        {"type": "image", "source": "x"},
        {"type": "image_url"},
        {"type": "image_url", "image_url": "x"},
        {"type": "image_url", "image_url": {"url": "data:text/plain;base64,AA=="}},
    ],
)
def test_what_is_no_image_is_named_by_its_place(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
    with pytest.raises(InvalidRequestError) as caught:
        with_sources(messages)
    assert caught.value.param == "messages[1].content[0]"


def test_files_that_are_no_images_are_errors_in_one_line(tmp_path: Path) -> None:
    empty, text, large = (tmp_path / name for name in ("empty", "text", "large"))
    empty.touch()
    text.write_text("a text")
    os.truncate(os.open(large, os.O_CREAT | os.O_WRONLY), MAX_BYTES + 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (empty, "has no bytes"),
        (text, "is not an image; allowed: PNG"),
        (large, "is larger than an image may be"),
        (pipe, "is not a file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none", "cannot be read: No such file"),
        ("\0", "cannot be read"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            address_of(path)
        assert f"{path} {words}" in str(caught.value)
        assert "\n" not in str(caught.value)
