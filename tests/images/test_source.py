"""Images in the text of a request."""

from __future__ import annotations

import base64
import tracemalloc
from typing import Any

import pytest

from minisgl.errors import InvalidRequestError
from minisgl.images.limits import MAX_BYTES
from minisgl.images.source import MEDIA_TYPES, ImageSource, sources_of

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/PNG;Base64,{TEXT}",
        f"data:image/jpeg;name=a.jpg;base64,{TEXT}",
        f"data:image/png;base64,{TEXT[:76]}\r\n{TEXT[76:]}\n",
        f"data:image/webp;base64,{TEXT.replace('=', '%3D')}",
        f"data:image/webp;base64,{TEXT.replace('=', '%3D')}%0A",
        f"data:image/png;base64,{' '.join(TEXT)}\t\v\f",
    ],
)
def test_a_data_url_has_the_bytes_of_an_image(url: str) -> None:
    assert ImageSource.of_url(url, is_low=True) == ImageSource(DATA, is_low=True)


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_a_data_url_may_have_each_media_type(media_type: str) -> None:
    assert ImageSource.of_url(f"data:{media_type};base64,{TEXT}") == ImageSource(DATA)


@pytest.mark.parametrize("url", ["http://example.com/a.png", "HTTPS://example.com/?a=b"])
def test_an_address_is_kept_for_later(url: str) -> None:
    assert ImageSource.of_url(url) == ImageSource(url=url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "allowed: data:image/png;base64"),
        ("cat.png", "allowed: data:image/png;base64"),
        ("/etc/passwd", "allowed: data:image/png;base64"),
        ("file:///etc/passwd", "allowed: data:image/png;base64"),
        ("ftp://example.com/a.png", "allowed: data:image/png;base64"),
        (" http://example.com/a.png", "allowed: data:image/png;base64"),
        ("http://example.com/" + "a" * 5000, "5019 characters; allowed: 4096"),
        ("data:", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,====", "not valid base64"),
        (f"data:image/png;base64,{TEXT[:-3]}", "not valid base64"),
        (f"data:image/png;base64,{TEXT[:-8]}ä{TEXT[-7:]}", "not valid base64"),
        (f"data:image/png;base64,{'_' + TEXT[1:]}", "not valid base64"),
        (f"data:image/svg+xml;base64,{TEXT}", "media type that is not supported; allowed: image/p"),
        (f"data:text/html;base64,{TEXT}", "media type"),
        (f"data:;base64,{TEXT}", "media type"),
        (f"data:{'x' * 9000};base64,{TEXT}", "not in base64"),
    ],
)
def test_what_is_no_address_of_an_image_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        ImageSource.of_url(url)


def test_the_text_of_an_image_is_limited_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "data:image/png;base64," + "A" * (MAX_BYTES // 3 * 4 + 8)
    with pytest.raises(InvalidRequestError, match="allowed: 16 MiB an image"):
        ImageSource.of_url(url)
    monkeypatch.setattr(base64, "b64decode", None)
    with pytest.raises(InvalidRequestError, match="allowed: 16 MiB an image"):
        ImageSource.of_url(url + "A" * 2 * MAX_BYTES)


def test_only_the_padding_of_a_long_text_is_unquoted(monkeypatch: pytest.MonkeyPatch) -> None:
    unquoted: list[str] = []

    def unquote(text: str) -> str:
        unquoted.append(text)
        return text

    monkeypatch.setattr("minisgl.images.source.unquote", unquote)
    with pytest.raises(InvalidRequestError, match="not valid base64"):
        ImageSource.of_url("data:image/png;base64," + "%41" * 10_000)
    assert unquoted == ["%41%41%41"]


def test_white_space_is_taken_out_without_a_string_for_each_piece() -> None:
    num_pieces = 100_000
    url = "data:image/png;base64," + "AAAA " * num_pieces
    tracemalloc.start()
    try:
        assert len(ImageSource.of_url(url).data) == 3 * num_pieces
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5 * len(url)  # a string of its own takes more than 50 bytes


def image(number: int) -> dict[str, Any]:
    return {"type": "image", "source": ImageSource(bytes([number]))}


def test_the_images_of_a_conversation_are_found_in_their_order() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [image(1), {"type": "text", "text": "b"}, image(2)]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": (image(3),)},
    ]
    assert [source.data for source in sources_of(messages)] == [b"\x01", b"\x02", b"\x03"]


def test_a_request_has_at_most_16_images() -> None:
    messages = [{"role": "user", "content": [image(number)]} for number in range(17)]
    assert len(sources_of(messages[:16])) == 16
    with pytest.raises(InvalidRequestError, match="have 17 images; allowed: 16 a request"):
        sources_of(messages)


def test_an_image_without_a_source_is_refused() -> None:
    for source in (None, "http://example.com", {"url": "file:///etc/passwd"}):
        content = [{"type": "image", "source": source}]
        with pytest.raises(InvalidRequestError, match="must have an ImageSource"):
            sources_of([{"role": "user", "content": content}])
