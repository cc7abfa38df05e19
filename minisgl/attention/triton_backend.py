"""Declares the backend of our own kernels, which triton_attention.py calls."""

from __future__ import annotations

from minisgl.attention.base import AttentionBackend, AttentionShape
from minisgl.attention.declaration import Backend, why_not_importable
from minisgl.config import ATTENTION_EXTRAS, BackendFacts


def _make(shape: AttentionShape | None) -> AttentionBackend:
    from minisgl.attention.triton_attention import TritonAttention

    return TritonAttention()


TRITON = Backend(
    facts=BackendFacts(
        name="triton",
        # On an H200, see backends.py: prefill 304 TFLOP/s, and 369 with pages of 64 tokens; decode
        # reads 3.9 to 4.1 TB/s at every ratio and page size, and 1 row of 800 takes 7.4 µs.
        prefill_rank=3,
        decode_rank=1,
        fp8_rank=1,
        extras=ATTENTION_EXTRAS,
        float32=True,
        captures_decode=True,
        captures_chunks=True,
    ),
    make=_make,
    why_missing=lambda capability, layers: why_not_importable("triton", "triton"),
)
