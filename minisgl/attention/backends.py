"""The attention backends by the names that `--attn` knows them by."""

from __future__ import annotations

from minisgl.attention.base import Attention, AttentionBackend
from minisgl.attention.torch_backend import TorchAttention


def make_attention(prefill: str, decode: str) -> Attention:
    """The pair of backends; one object where both names are the same."""
    first = _make(prefill)
    return Attention(first, first if decode == prefill else _make(decode))


def _make(name: str) -> AttentionBackend:
    match name:
        case "torch":
            return TorchAttention()
        case _:
            raise ValueError(f"no attention backend {name}; the config lets none through")
