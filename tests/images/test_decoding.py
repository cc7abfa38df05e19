"""Images of strangers: what is right, and what is refused before or while it is decoded."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.image_checkpoints import colourful, encoded

from minisgl.errors import InvalidRequestError
from minisgl.images.decoding import decode
from minisgl.images.limits import LOW_SIDE, MAX_PIXELS

WHITE, RED = (255, 255, 255), (255, 0, 0)
ORIENTATION = 0x0112
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'


def seen(data: bytes, *, is_low: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    image, _ = decode(data, max_pixels, is_low=is_low)
    assert image.mode == "RGB"
    return image


def png(width: int, height: int, rows: bytes, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG from its parts, which may say what its data are not."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_decoded_from_each_format(form: str) -> None:
    data = encoded(Image.new("RGB", (9, 5), RED), form)
    image, num_pixels = decode(data, MAX_PIXELS, is_low=False)
    assert (image.size, num_pixels) == ((9, 5), 45)
    assert np.abs(np.asarray(image).astype(int) - RED).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation: int) -> None:
    upright = colourful(6, 4)
    stored = upright
    for step in {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }.get(orientation, []):
        stored = stored.transpose(step)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    assert seen(encoded(stored, exif=exif)).tobytes() == upright.tobytes()


@pytest.mark.parametrize("exif", [b"Exif\x00\x00nothing", b"Exif\x00\x00II*\x00\xff\xff\xff\xff"])
def test_exif_that_cannot_be_read_turns_nothing(exif: bytes) -> None:
    image = colourful(6, 4)
    assert seen(encoded(image, exif=exif)).tobytes() == image.tobytes()


def test_a_photograph_with_an_odd_tag_is_turned_upright() -> None:
    tags = [(0x010F, 11, 1, struct.pack("<f", 1.0)), (ORIENTATION, 3, 1, struct.pack("<HH", 6, 0))]
    exif = b"Exif\x00\x00II*\x00" + struct.pack("<LH", 8, len(tags))
    exif += b"".join(struct.pack("<HHL", *tag) + value for *tag, value in tags) + bytes(4)
    assert seen(encoded(Image.new("RGB", (4, 2)), "JPEG", exif=exif)).size == (2, 4)


def test_memory_that_is_short_while_an_image_is_turned_is_not_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", turn)
    with pytest.raises(MemoryError):
        seen(encoded(colourful(6, 4)))


def test_what_is_transparent_is_seen_over_white() -> None:
    clear, half = (255, 0, 0, 0), (255, 0, 0, 128)
    layer = Image.new("RGBA", (2, 1), clear)
    layer.putpixel((1, 0), half)
    image = seen(encoded(layer))
    assert image.getpixel((0, 0)) == WHITE
    assert image.getpixel((1, 0)) == (255, 127, 127)
    grey = Image.new("LA", (1, 1), (0, 0))
    assert seen(encoded(grey)).getpixel((0, 0)) == WHITE
    palette = Image.new("P", (1, 1))
    palette.putpalette([*RED, 0, 0, 255])
    assert seen(encoded(palette)).getpixel((0, 0)) == RED
    assert seen(encoded(palette, transparency=0)).getpixel((0, 0)) == WHITE
    assert seen(encoded(palette, "GIF", transparency=0)).getpixel((0, 0)) == WHITE


def test_grey_of_16_bits_keeps_its_shades() -> None:
    shades = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    image = seen(encoded(Image.fromarray(shades)))
    assert np.asarray(image)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    clear = seen(encoded(Image.fromarray(shades), transparency=256))
    assert np.asarray(clear)[0, :, 0].tolist() == [0, 0, 255, 128, 255]
    colour = png(1, 1, b"\x00" + struct.pack(">HHH", 65535, 32768, 0), bits=16)
    assert seen(colour).getpixel((0, 0)) == (255, 128, 0)


def test_cmyk_and_bitmaps_become_rgb() -> None:
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    found = np.asarray(seen(encoded(ink, "JPEG", quality=100))).astype(int)
    assert np.abs(found - RED).max() <= 8
    assert seen(encoded(Image.new("1", (8, 8), 1))).getpixel((0, 0)) == WHITE


def test_a_reduced_image_fits_into_a_square_and_counts_as_it_came() -> None:
    image, num_pixels = decode(encoded(colourful(1200, 300), "JPEG"), MAX_PIXELS, is_low=True)
    assert image.size == (LOW_SIDE, LOW_SIDE // 4)
    assert num_pixels == 360_000
    assert seen(encoded(colourful(9, 5)), is_low=True).size == (9, 5)


def test_the_second_picture_of_a_camera_is_no_animation() -> None:
    file = io.BytesIO()
    colourful(8, 8).save(file, "MPO", save_all=True, append_images=[colourful(8, 8, seed=1)])
    assert seen(file.getvalue()).size == (8, 8)


def test_a_strip_is_decoded_since_only_the_processor_knows_which_shapes_it_takes() -> None:
    assert seen(encoded(colourful(1, 4000))).size == (1, 4000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no image at all", "no format that is known; allowed: PNG, JPEG, WebP"),
        (SVG, "no format that is known"),
        (b"%PDF-1.7\n", "no format that is known"),
        (encoded(colourful(9, 9), "BMP"), "no format that is known"),
        (encoded(colourful(9, 9), "TIFF"), "no format that is known"),
        (encoded(colourful(90, 90))[:-400], "damaged or incomplete"),
        (encoded(colourful(90, 90), "JPEG")[:600], "damaged or incomplete"),
        (encoded(colourful(90, 90), "WEBP")[:600], "damaged or incomplete"),
        (encoded(colourful(90, 90), "GIF")[:900], "damaged or incomplete"),
        (png(9, 9, b"\x00" * 20), "damaged or incomplete"),
        (png(0, 9, b"\x00" * 20), "damaged or incomplete|no format"),
        (png(3, 1, b"\x00" * 4, colour=3), "damaged or incomplete"),  # without its palette
    ],
    ids=range(12),
)
def test_what_is_no_image_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        seen(data)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(form: str) -> None:
    frames = [colourful(8, 8, seed=seed) for seed in range(3)]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidRequestError, match="animated; allowed: PNG, JPEG, WebP and GIF of"):
        seen(data)


@pytest.mark.parametrize(("width", "height"), [(13_000, 13_000), (6_000, 6_000)])
def test_a_bomb_is_refused_by_its_header(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(width, height, b"", bits=1, colour=0)
    assert len(data) < 21_000

    def load(_: object) -> None:
        raise AssertionError("it is decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidRequestError, match="32,000,000 an image"):
        seen(data)


def test_the_room_of_a_request_limits_an_image() -> None:
    data = encoded(colourful(9, 5))
    assert seen(data, max_pixels=45).size == (9, 5)
    with pytest.raises(InvalidRequestError, match=r"9 × 5 pixels.*64,000,000 a request"):
        seen(data, max_pixels=44)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    cut=st.integers(0, 2000),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
)
def test_damaged_files_are_decoded_or_refused(
    form: str, cut: int, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(encoded(colourful(24, 16), form))
    for place, value in changes:
        data[place % len(data)] = value
    try:
        seen(bytes(data[: max(1, len(data) - cut)]))
    except InvalidRequestError as error:
        assert "allowed" in str(error) or "send" in str(error)
