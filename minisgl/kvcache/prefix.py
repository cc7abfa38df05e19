"""Tokens as bytes: the keys of prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids into bytes, so that prefixes compare and hash at memory speed."""
    return array("i", token_ids).tobytes()
