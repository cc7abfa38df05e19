"""Windows, soft caps, sinks, and values of another width in the Triton kernels on a GPU: in every
dtype, with long rows, large batches and CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from support.attention_cases import (
    Shape,
    assert_close,
    check_blocks,
    check_decode,
    check_decode_qkv,
    check_prefill,
    in_float32,
    paged_cache,
)

from minisgl.attention.base import DecodeBatch, PrefillBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales

pytestmark = pytest.mark.gpu

FP8 = KVScales(k=0.02, v=0.013)
PLAIN = Shape(8, 64, 16, num_kv_heads=4, dtype=torch.bfloat16, device="cuda")
GPT_OSS = replace(PLAIN, window=128, has_sinks=True)
SHAPES = [
    GPT_OSS,
    replace(GPT_OSS, window=None),
    replace(GPT_OSS, page_size=64),
    replace(GPT_OSS, page_size=1, dtype=torch.float16),
    replace(GPT_OSS, kv_scales=FP8),
    replace(PLAIN, group=2, head_dim=256, window=1024),
    replace(PLAIN, group=2, head_dim=256, window=1024, softcap=50.0),
    replace(PLAIN, group=2, head_dim=256, window=1024, softcap=50.0, kv_scales=FP8),
    replace(PLAIN, group=4, head_dim=128, window=4096),
    replace(PLAIN, head_dim=512),
    replace(PLAIN, head_dim=512, kv_scales=FP8),
    replace(PLAIN, head_dim=512, softcap=30.0, window=1000, dtype=torch.float16),
    replace(PLAIN, group=3, head_dim=128, softcap=3.0, dtype=torch.float32),
]
WIDTHS = [
    replace(GPT_OSS, head_dim=192, value_dim=128),
    replace(PLAIN, group=16, head_dim=192, value_dim=128),
    replace(GPT_OSS, head_dim=192, value_dim=128, kv_scales=FP8),
]


@pytest.mark.parametrize("shape", SHAPES + WIDTHS, ids=str)
def test_decode_matches_the_reference(shape: Shape) -> None:
    check_decode(TritonAttention(), shape, [1, 2, 127, 128, 129, 255, 1000, 5000])
    check_decode(TritonAttention(), shape, [9000], seed=1)
    draw = random.Random(0)
    check_decode(TritonAttention(), shape, [draw.randint(1, 3000) for _ in range(64)], seed=2)


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_rope_store_decode_matches_the_reference(shape: Shape, normed: bool) -> None:
    check_decode_qkv(TritonAttention(), shape, [0, 1, 128, 129, 1000, 5000], normed=normed)


@pytest.mark.parametrize(
    "shape",
    [
        replace(PLAIN, group=2, head_dim=256, window=1024, norms_v=True),
        replace(PLAIN, head_dim=512, norms_v=True, v_is_k=True),
        replace(PLAIN, head_dim=512, norms_v=True, v_is_k=True, kv_scales=FP8),
    ],
    ids=str,
)
def test_fused_decode_of_values_that_are_normed_or_keys(shape: Shape) -> None:
    check_decode_qkv(TritonAttention(), shape, [0, 1, 128, 129, 1000, 5000], normed=True)


@pytest.mark.parametrize("shape", SHAPES + WIDTHS, ids=str)
def test_prefill_matches_the_reference(shape: Shape) -> None:
    """Whole prompts, and chunks that begin inside a window; alone, so that their keys are split,
    and with many others."""
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 300), (100, 66), (1000, 129), (5000, 1)])
    check_prefill(TritonAttention(), shape, [(9000, 20)], seed=1)
    check_prefill(TritonAttention(), shape, [(0, 6000), (5000, 300)], seed=2)
    check_blocks(TritonAttention(), shape, [(0, 1), (0, 300), (5000, 300)], seed=2)


@pytest.mark.parametrize("shape", [GPT_OSS, WIDTHS[0]], ids=["64", "192"])
def test_captured_steps_are_right_at_any_lengths(shape: Shape) -> None:
    """Decode and chunks, captured of the scratch page and of no chunks."""
    draw = random.Random(0)
    longest = [draw.randint(200, 4000) for _ in range(16)]
    kv, full_table = paged_cache(shape, longest, starts=[0] * 16)
    table = torch.zeros_like(full_table)
    lengths = torch.zeros(16, dtype=torch.int32, device="cuda")
    rows = DecodeBatch(table, lengths, 4000)
    bounds = torch.zeros(33, dtype=torch.int32, device="cuda")
    chunks = PrefillBatch(table, bounds[:17], bounds[17:], 16, (), ())
    q, backend = shape.queries(16), TritonAttention()

    def attend() -> list[torch.Tensor]:
        return [
            backend.decode(shape.call(q, kv), rows),
            backend.prefill(shape.call(q, kv), chunks),
        ]

    attend()  # compiles, and makes the workspaces
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded, filled = attend()
    table.copy_(full_table)
    for _ in range(4):
        limits = [draw.randint(1, length) for length in longest]
        lengths.copy_(torch.tensor(limits))
        bounds[:17] = torch.arange(17)  # a chunk of one token each
        bounds[17:] = lengths
        torch.cuda.synchronize()  # pages and bounds are to be older than the launch before
        graph.replay()
        expected = TorchAttention().decode(shape.call(*in_float32(q, kv)), rows)
        assert_close(decoded, expected, shape)
        assert_close(filled, expected, shape)
