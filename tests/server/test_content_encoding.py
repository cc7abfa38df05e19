"""Compressed bodies: what they become, and what decoding them costs."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.http_server import HELLO
from support.serving import Served, served

from minisgl.server.http.bodies import MAX_BODY_BYTES
from minisgl.server.http.content_encoding import (
    ENCODINGS,
    MAX_MEMBERS,
    PIECE_BYTES,
    BodyDecoder,
    decoder_for,
)
from minisgl.server.http.faults import HTTPError

TEXT = json.dumps({"messages": HELLO, "max_tokens": 20, "seed": 3}).encode()
NEEDS_ZSTD = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs backports.zstd")


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def zstd(data: bytes, **options: int) -> bytes:
    """options: names of CompressionParameter."""
    try:
        library: Any = import_module("compression.zstd")
    except ImportError:
        library = import_module("backports.zstd")
    given = {library.CompressionParameter[name]: value for name, value in options.items()}
    compressed: bytes = library.compress(data, options=given)
    return compressed


FORMS = [
    pytest.param("gzip", gzip.compress, id="gzip"),
    pytest.param("deflate", zlib.compress, id="deflate"),
    pytest.param("deflate", raw_deflate, id="raw deflate"),
    pytest.param("zstd", zstd, id="zstd", marks=NEEDS_ZSTD),
]
Compress = Callable[[bytes], bytes]


def decoded(encoding: str, *parts: bytes) -> bytes:
    decoder = BodyDecoder(encoding)
    found = b"".join(chain.from_iterable(map(decoder.pieces, parts)))
    decoder.end()
    return found


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
@given(st.binary(max_size=300), st.lists(st.integers(0, 400), max_size=5))
def test_any_body_is_decoded_however_it_arrives(
    encoding: str, compress: Compress, data: bytes, cuts: list[int]
) -> None:
    body = compress(data)
    ends = [*sorted(cuts), len(body)]
    parts = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert decoded(encoding, *parts) == data


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
def test_a_body_of_several_members_is_all_of_them(encoding: str, compress: Compress) -> None:
    body = compress(b"one, ") + compress(b"") + compress(b"two")
    assert decoded(encoding, body) == b"one, two"
    assert decoded(encoding, *(bytes([byte]) for byte in body)) == b"one, two"


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
def test_a_body_that_is_cut_or_changed_is_refused(encoding: str, compress: Compress) -> None:
    body = compress(TEXT)
    assert decoded(encoding) == decoded(encoding, b"") == b""
    for end in range(1, len(body)):
        with pytest.raises(HTTPError, match="ends too early") as refused:
            decoded(encoding, body[:end])
        assert refused.value.http_status == 400
    with pytest.raises(HTTPError, match=f"Content-Encoding says {encoding}, but the body"):
        decoded(encoding, TEXT)
    with pytest.raises(HTTPError, match=f"Content-Encoding says {encoding}, but the body"):
        decoded(encoding, body + b"\xff\xff\xff\xff")


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
def test_the_number_of_members_is_limited(encoding: str, compress: Compress) -> None:
    assert decoded(encoding, compress(b"x") * MAX_MEMBERS) == b"x" * MAX_MEMBERS
    with pytest.raises(HTTPError, match="more than 1,024 compressed parts"):
        decoded(encoding, compress(b"") * (MAX_MEMBERS + 1))


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
def test_what_decodes_to_much_takes_a_piece_of_memory_at_a_time(
    encoding: str, compress: Compress
) -> None:
    bomb = compress(bytes(32 << 20))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        pieces = BodyDecoder(encoding).pieces(bomb)
        assert sum(len(next(pieces)) for _ in range(20)) == 20 * PIECE_BYTES
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


@NEEDS_ZSTD
def test_a_window_of_zstd_that_takes_much_memory_is_refused() -> None:
    content = b"x" * (9 << 20)
    assert decoded("zstd", zstd(content, window_log=23, compression_level=1)) == content
    with pytest.raises(HTTPError, match="is broken"):
        decoded("zstd", zstd(content, window_log=27, compression_level=1))


@pytest.mark.parametrize("header", ["", "identity", " Identity "])
def test_a_body_that_is_not_compressed_needs_no_decoder(header: str) -> None:
    assert decoder_for(header) is None


@pytest.mark.parametrize("header", ["gzip", "x-gzip", " GZIP "])
def test_the_case_of_an_encoding_does_not_matter(header: str) -> None:
    decoder = decoder_for(header)
    assert decoder is not None and b"".join(decoder.pieces(gzip.compress(b"x"))) == b"x"


# -- the server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Served[FakeEngine]]:
    async def start() -> FakeEngine:
        return FakeEngine()

    with served(start) as running:
        yield running


@pytest.fixture
def http(server: Served[FakeEngine]) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def post(http: httpx.Client, path: str, body: Any, encoding: str, **more: str) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding, **more}
    return http.post(path, content=body, headers=headers)


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "seed": 3, "max_tokens": 5}),
        ("/v1/completions", {"prompt": "hello", "seed": 3, "max_tokens": 5}),
        ("/v1/responses", {"input": "hello", "seed": 3, "max_output_tokens": 5}),
        ("/v1/messages", {"messages": HELLO, "seed": 3, "max_tokens": 5}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_a_compressed_body_has_the_answer_of_a_plain_one(
    http: httpx.Client, path: str, body: Any, encoding: str, compress: Compress
) -> None:
    def told(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        answer = response.json()
        return [answer.get(key) for key in ("usage", "tokens", "content", "choices")]

    data = json.dumps(body).encode()
    assert told(post(http, path, compress(data), encoding)) == told(http.post(path, json=body))


@pytest.mark.parametrize("header", ["br", "gzip, gzip", "identity, gzip", "x-zstd", "gzip;q=1"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_another_encoding_is_a_415_that_names_the_header(
    http: httpx.Client, path: str, header: str
) -> None:
    response = post(http, path, gzip.compress(TEXT), header)
    assert response.status_code == 415
    error, allowed = response.json()["error"], ", ".join(ENCODINGS)
    assert error["type"] == "invalid_request_error"
    assert f"Content-Encoding is not supported; allowed: {allowed} or" in error["message"]


def test_without_a_library_zstd_is_a_415(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.server.http.content_encoding._MEMBERS", {})
    assert post(http, "/v1/chat/completions", b"x", "zstd").status_code == 415


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
def test_a_bomb_is_a_413(http: httpx.Client, encoding: str, compress: Compress) -> None:
    largest = b'{"tokens": []%s}' % (b" " * (MAX_BODY_BYTES - 14))
    assert post(http, "/detokenize", compress(largest), encoding).json() == {"prompt": ""}
    response = post(http, "/detokenize", compress(largest + b" "), encoding)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_a_broken_body_is_a_400_and_the_next_request_is_answered(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    for body in (TEXT, gzip.compress(TEXT)[:-1]):
        response = post(http, path, body, "gzip")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_encoding")
    assert post(http, path, gzip.compress(TEXT), "gzip").status_code == 200


def test_a_compressed_body_may_come_in_chunks(http: httpx.Client) -> None:
    body = gzip.compress(TEXT)
    chunks = (body[start : start + 7] for start in range(0, len(body), 7))
    assert post(http, "/v1/chat/completions", chunks, "gzip").status_code == 200
