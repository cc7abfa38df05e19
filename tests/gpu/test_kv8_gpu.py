"""A KV cache in FP8 on a GPU: every backend that reads it, in half precision, against float32."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from support.attention_cases import (
    Shape,
    assert_close,
    assert_stored,
    check_decode,
    check_decode_qkv,
    check_prefill,
    forget_own,
    in_float32,
    paged_cache,
    turned_and_attended,
)
from support.layer_cases import Heads, check_heads

from minisgl.attention.backends import available_backends, make_attention
from minisgl.attention.base import (
    AttentionCall,
    AttentionShape,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import DecodeTiles

pytestmark = pytest.mark.gpu

SCALES = KVScales(k=0.02, v=0.013)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def fp8(group: int, head_dim: int, page_size: int, dtype: torch.dtype) -> Shape:
    return Shape(group, head_dim, page_size, 4, dtype, "cuda", SCALES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_size_and_page_size(head_dim: int, page_size: int, dtype: torch.dtype) -> None:
    shape = fp8(4, head_dim, page_size, dtype)
    check_decode(TritonAttention(), shape, [1, 2, 63, 64, 65, 127, 129, 255, 257, 1000])
    check_decode_qkv(TritonAttention(), shape, [0, 1, 2, 64, 65, 193, 1000], normed=True)
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 64), (63, 66), (300, 129), (1000, 1)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 5, 8, 16])
def test_every_group(group: int, dtype: torch.dtype) -> None:
    shape = fp8(group, 128, 16, dtype)
    check_decode(TritonAttention(), shape, [1, 31, 32, 33, 500, 2047])
    check_decode_qkv(TritonAttention(), shape, [3000], normed=False)
    check_prefill(TritonAttention(), shape, [(0, 300), (17, 40), (511, 2), (5, 1)])


@pytest.mark.parametrize("num_rows", [1, 8, 33, 256])
def test_batches_and_long_rows(num_rows: int) -> None:
    draw = random.Random(num_rows)
    lengths = [draw.randint(1, 1500) for _ in range(num_rows)]
    shape = fp8(5, 128, 16, torch.bfloat16)
    check_decode(TritonAttention(), shape, [*lengths[1:], 32768])
    check_decode_qkv(TritonAttention(), shape, lengths, normed=True)


@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_any_tiles(block_n: int) -> None:
    tiles = DecodeTiles(block_n, 4, num_stages=3, programs_per_sm=2, min_split=64)
    check_decode(TritonAttention(tiles), fp8(5, 128, 16, torch.bfloat16), [1, 127, 129, 5000])


@pytest.mark.parametrize("power", [-50, 30, 40])
def test_queries_in_bfloat16_keep_their_range(power: int) -> None:
    shape = fp8(4, 128, 16, torch.bfloat16)
    kv, table = paged_cache(shape, [700, 33])
    lengths = torch.tensor([700, 33], dtype=torch.int32, device="cuda")
    rows, chunks = DecodeBatch(table, lengths, 700), PrefillBatch.of(table, (699, 32), (1, 1))
    q, backend = shape.queries(2), TritonAttention()
    scale = shape.spec.scale * 2.0**-power
    spec = type(shape.spec)(num_heads=16, num_kv_heads=4, head_dim=128, scale=scale)
    for attend, batch in ((backend.decode, rows), (backend.prefill, chunks)):
        out = attend(shape.call(q, kv), batch)
        assert torch.equal(attend(AttentionCall(q * 2.0**power, kv, spec), batch), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 33, 3000])
def test_the_kv_write(num_rows: int, dtype: torch.dtype) -> None:
    """Also of numbers beyond the range, which saturate."""
    for normed, scales in ((False, KVScales(0.004, 0.003)), (True, KVScales())):
        heads = Heads(num_heads=40, num_kv_heads=8, head_dim=128, normed=normed)
        check_heads(num_rows, heads, 16, dtype, torch.device("cuda"), scales=scales)


def test_a_captured_graph_turns_and_stores() -> None:
    shape = fp8(5, 128, 16, torch.bfloat16)
    limits = [3000, 700, 129, 1, 32768]
    kv, table = paged_cache(shape, limits)
    lengths = torch.tensor(limits, dtype=torch.int32, device="cuda")
    qkv, norm_rope = shape.qkv(5), shape.norm_rope(32768, normed=True)
    backend, rows = TritonAttention(), DecodeBatch(table, lengths, 32768)
    forget_own(kv, rows)
    backend.decode(shape.call(qkv, kv, norm_rope), rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode(shape.call(qkv, kv, norm_rope), rows)
    for _ in range(4):
        qkv.copy_(torch.randn_like(qkv))
        forget_own(kv, rows)
        expected, expected_kv = turned_and_attended(qkv, kv, rows, norm_rope, shape)
        torch.cuda.synchronize()
        graph.replay()
        assert_close(out, expected, shape)
        assert_stored(kv, expected_kv, rows)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("name", ["torch", "fi", "trtllm"])
def test_the_other_backends(name: str, group: int, page_size: int) -> None:
    shape = fp8(group, 128, page_size, torch.bfloat16)
    found = available_backends(torch.cuda.get_device_capability(), (shape.spec,))
    if name in found.missing:
        pytest.skip(found.missing[name])
    lengths, starts, num_queries = [1, 65, 800], (0, 300), (70, 33)
    ends = [start + number for start, number in zip(starts, num_queries, strict=True)]
    kv, table = paged_cache(shape, [*lengths, *ends])
    table = table.clamp(max=kv.k.shape[0] - 1)
    for cache in (kv.k, kv.v):  # the kernels multiply what no row wrote by zero
        bits = cache.view(torch.uint8)
        bits[bits & 0x7F == 0x7F] = 0x70
    heads = AttentionShape(
        layers=frozenset((shape.spec,)),
        page_size=page_size,
        dtype=shape.dtype,
        kv_dtype=kv.k.dtype,
    )
    attention = make_attention(name, name, heads)
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows = DecodeBatch(table[:3], on_device, 800, lengths_host=lengths)
    chunks = PrefillBatch.of(table[3:], starts, num_queries)
    nothing = torch.empty(0, dtype=torch.int64, device="cuda")
    none = Rows.of(nothing, nothing)
    attention.prepare(
        ForwardBatch(nothing, none, none, nothing, rows, chunks, BatchSlots(nothing, nothing))
    )
    reference = TorchAttention()
    q = shape.queries(3).contiguous()
    out = attention.decode_backend.decode(shape.call(q, kv), rows)
    if name == "trtllm" and torch.cuda.get_device_capability() == (9, 0):
        q = q.to(torch.float8_e4m3fn).to(q)  # as XQA multiplies it there
    expected = reference.decode(shape.call(*in_float32(q, kv)), rows)
    assert (out.float() - expected).abs().max() <= 0.02 * expected.abs().max()
    q = shape.queries(103).contiguous()
    out = attention.prefill_backend.prefill(shape.call(q, kv), chunks)
    expected = reference.prefill(shape.call(*in_float32(q, kv)), chunks)
    assert (out.float() - expected).abs().max() <= 0.02 * expected.abs().max()
