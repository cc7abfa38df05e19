"""Decodes bodies that clients have compressed, in pieces of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

from minisgl.errors import one_of
from minisgl.server.http.faults import HTTPError

PIECE_BYTES = 1 << 20  # decoding that much blocks the loop for some milliseconds
# Compressed parts of a body one after the other, which gzip and zstd allow; each takes a decoder.
MAX_MEMBERS = 1024
MAX_WINDOW_LOG = 23  # of zstd, as RFC 9659 has it: a frame may ask for a window of any size
ZLIB, RAW, GZIP = 15, -15, 31  # what zlib reads, and the size of its window


class _Member(Protocol):
    """A decoder of one compressed part, as Python has it for most formats."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Inflater:
    """zlib's decoder with the interface of the others."""

    def __init__(self, window_bits: int) -> None:
        self._decoder = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length
        return piece


def _deflate(beginning: bytes) -> _Member:
    """Of zlib's format, as the standard has it, or without its head, as some clients send it."""
    return _Inflater(ZLIB if beginning[0] & 0x0F == zlib.DEFLATED else RAW)


def _find_zstd() -> Any:
    """Python's module for zstd, or the same for an earlier Python; None without both."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return import_module(name)
    return None


_zstd = _find_zstd()
ERRORS: tuple[type[Exception], ...] = (zlib.error, *((_zstd.ZstdError,) if _zstd else ()))


def _zstd_frame(beginning: bytes) -> _Member:
    options = {_zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
    frame: _Member = _zstd.ZstdDecompressor(options=options)
    return frame


# What begins a member, given its first bytes.
_MEMBERS: Mapping[str, Callable[[bytes], _Member]] = {
    "gzip": lambda beginning: _Inflater(GZIP),
    "deflate": _deflate,
    **({"zstd": _zstd_frame} if _zstd else {}),
}
ENCODINGS = tuple(_MEMBERS)


class BodyDecoder:
    """Decodes one body. Raises HTTPError for a body that is not what its header says."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._member: _Member | None = None  # that has begun
        self._num_members = 0

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What the next bytes of the body add to it."""
        while part or (self._member and not self._member.needs_input):
            member = self._member or self._begin(part)
            try:
                piece = member.decompress(part, PIECE_BYTES)
            except ERRORS as error:
                raise self._fault("is broken") from error
            self._member, part = (None, member.unused_data) if member.eof else (member, b"")
            yield piece

    def end(self) -> None:
        """Check that the body has all of its last part."""
        if self._member is not None:
            raise self._fault("ends too early")

    def _begin(self, beginning: bytes) -> _Member:
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise self._fault(f"has more than {MAX_MEMBERS:,} compressed parts")
        return _MEMBERS[self._encoding](beginning)

    def _fault(self, what: str) -> HTTPError:
        said = f"The header Content-Encoding says {self._encoding}, but the body {what}."
        return HTTPError(400, said, "invalid_encoding")


def decoder_for(header: str) -> BodyDecoder | None:
    """What decodes a body with this Content-Encoding; None for one that is not compressed.

    Raises HTTPError for an encoding that is not supported, and for several.
    """
    encoding = header.strip().lower()
    encoding = "gzip" if encoding == "x-gzip" else encoding
    if encoding in ("", "identity"):
        return None
    if encoding not in _MEMBERS:
        said = f"The header Content-Encoding is not supported; {one_of((*ENCODINGS, 'identity'))}."
        raise HTTPError(415, said, "unsupported_encoding")
    return BodyDecoder(encoding)
