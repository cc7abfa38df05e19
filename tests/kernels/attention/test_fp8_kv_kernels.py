"""A KV cache in FP8: Triton's attention and its KV write against the references, in Triton's
interpreter where there is no GPU. bfloat16 is in tests/gpu."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.attention_cases import (
    Shape,
    assert_close,
    check_decode,
    check_decode_qkv,
    check_prefill,
    in_float32,
    paged_cache,
)
from support.layer_cases import Heads, check_heads

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.kernels.tuning import DecodeTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALES = KVScales(k=0.02, v=0.013)  # that use the range: of normal numbers some exceed 4
TILES = DecodeTiles(block_n=32, num_warps=4, num_stages=2, programs_per_sm=16, min_split=64)
SHAPES = [
    Shape(group, head_dim, page_size, 1 + group % 2, dtype, str(DEVICE), SCALES)
    for group, head_dim, page_size, dtype in [
        (5, 128, 16, torch.float32), (3, 80, 3, torch.float32),
        (2, 128, 64, torch.float16), (18, 64, 4, torch.float16),
    ]
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_reads_what_is_stored(shape: Shape) -> None:
    check_decode(TritonAttention(TILES), shape, [1, 64, 65, 200])
    check_prefill(TritonAttention(), shape, [(0, 17), (63, 2), (130, 33)])


@pytest.mark.parametrize("power", [-50, -20, 30, 40])
def test_queries_in_bfloat16_keep_their_range(power: int) -> None:
    """They are multiplied in float16, whose range is much smaller, row by row."""
    shape = Shape(4, 64, 16, 1, torch.bfloat16, str(DEVICE), SCALES)
    kv, table = paged_cache(shape, [70, 33])
    lengths = torch.tensor([70, 33], dtype=torch.int32, device=DEVICE)
    rows, chunks = DecodeBatch(table, lengths, 70), PrefillBatch.of(table, (69, 32), (1, 1))
    q = shape.queries(2).clamp(-100, 100)
    larger = q.clone()
    larger[:, 1:3] *= 2.0**power
    backend = TritonAttention(TILES)
    smaller = replace(shape.spec, scale=shape.spec.scale * 2.0**-power)
    for attend, batch in ((backend.decode, rows), (backend.prefill, chunks)):
        out = attend(shape.call(q, kv), batch)
        same = attend(AttentionCall(larger, kv, smaller), batch)
        assert torch.equal(same[:, 1:3], out[:, 1:3])
    assert_close(out, TorchAttention().prefill(shape.call(*in_float32(q, kv)), chunks), shape)


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_stores_its_own_token_and_attends_to_what_it_stored(
    shape: Shape, normed: bool
) -> None:
    check_decode_qkv(TritonAttention(TILES), shape, [1, 193, 0, 65], normed=normed)


def test_an_own_token_alone_gives_back_its_rounded_value() -> None:
    """Softmax over one key is 1, so that the result is v as it is stored, not as it came."""
    shape = replace(SHAPES[1], kv_scales=KVScales(k=0.02, v=0.5))
    kv, table = paged_cache(shape, [1])
    rows = DecodeBatch(table, torch.ones(1, dtype=torch.int32, device=DEVICE), 1)
    qkv, norm_rope = shape.qkv(1), shape.norm_rope(1, normed=False)
    out = TritonAttention().decode(shape.call(qkv, kv, norm_rope), rows)
    v = qkv[:, -shape.num_kv_heads * shape.head_dim :].view(1, shape.num_kv_heads, -1)
    v = v.repeat_interleave(shape.group, 1)
    stored = (v / 0.5).to(torch.float8_e4m3fn).to(v.dtype) * 0.5
    assert not torch.equal(stored, v)
    torch.testing.assert_close(out, stored, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_the_kv_write_rounds_as_the_reference_does(dtype: torch.dtype, normed: bool) -> None:
    """Without norm to the bit, and numbers beyond the range saturate."""
    for scales in (KVScales(), KVScales(0.01, 0.004)):
        heads = Heads(num_heads=5, num_kv_heads=2, head_dim=64, normed=normed)
        check_heads(9, heads, 4, dtype, DEVICE, scales=scales)
