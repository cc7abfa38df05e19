"""Attention over keys whose first numbers are the values: the Triton kernels against
TorchAttention, in Triton's interpreter where there is no GPU."""

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
    check_decode,
    check_decode_runs,
    check_prefill,
    paged_cache,
)

from minisgl.attention.base import DecodeBatch
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.kernels.attention.paged_common import num_groups
from minisgl.kernels.tuning import DecodeTiles, PrefillTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = KVScales(k=0.02, v=0.02)
# Small, so that there are several tiles and splits.
TILES = DecodeTiles(block_n=16, num_warps=4, num_stages=2, programs_per_sm=16, min_split=16)
WHOLE_CHUNKS = PrefillTiles(32, 16, num_warps=4, num_stages=2, programs_per_sm=0)
SPLIT_CHUNKS = replace(WHOLE_CHUNKS, programs_per_sm=4, min_split=32)


def latents(num_heads: int, rank: int, tail: int, page_size: int, **features: object) -> Shape:
    """Of `rank` numbers, with `tail` behind them."""
    plain = Shape(num_heads, rank + tail, page_size, 1, device=DEVICE, value_dim=rank, v_in_k=True)
    return replace(plain, **features)  # type: ignore[arg-type]


# More heads than a program has, in groups that fill it or not; widths that are no powers of two, of
# which one is merged by several programs.
SHAPES = [
    latents(1, 200, 16, 16),
    latents(1, 64, 16, 16),
    latents(40, 48, 32, 1),
    latents(5, 40, 24, 3, window=20, has_sinks=True, softcap=5.0),
    latents(16, 64, 10, 64, dtype=torch.float16),
    latents(20, 48, 10, 16, kv_scales=SCALES),
    latents(3, 32, 6, 16, kv_scales=SCALES, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_matches_the_reference(shape: Shape) -> None:
    check_decode(TritonAttention(TILES), shape, [1, 16, 17, 33, 130])


def test_rows_of_runs_match_the_reference() -> None:
    """Some behind the end of their run."""
    runs = [(10, 4), (130, 3), (1, 1), (0, 0)]
    check_decode_runs(TritonAttention(TILES), latents(20, 48, 10, 16), 4, runs)


@pytest.mark.parametrize("tiles", [WHOLE_CHUNKS, SPLIT_CHUNKS], ids=["whole", "split"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_matches_the_reference(shape: Shape, tiles: PrefillTiles) -> None:
    backend = TritonAttention(prefill=tiles)
    check_prefill(backend, shape, [(0, 1), (0, 18), (15, 3), (90, 9)])


def test_the_tiles_of_the_device() -> None:
    """At the widths of published models."""
    shape = latents(20, 512, 64, 16)
    check_decode(TritonAttention(), shape, [33, 2])
    check_decode(TritonAttention(), shape, [33, 2, 5, 70, 1])
    check_prefill(TritonAttention(), shape, [(20, 3)])


def test_padded_rows_are_zeros() -> None:
    shape = latents(20, 64, 32, 16)
    kv, table = paged_cache(shape, [40, 0])
    rows = DecodeBatch(table, torch.tensor([40, 0], dtype=torch.int32, device=DEVICE), 40)
    out = TritonAttention(TILES).decode(shape.call(shape.queries(2), kv), rows)
    assert out[0].abs().min() > 0 and (out[1] == 0).all()


@pytest.mark.parametrize(
    ("num_heads", "expected"), [(1, 1), (20, 1), (32, 1), (33, 3), (37, 37), (64, 2), (128, 4)]
)
def test_heads_are_divided_into_groups_of_one_size(num_heads: int, expected: int) -> None:
    spec = latents(num_heads, 64, 16, 16).spec
    assert num_groups(num_heads, 1, spec) == expected
    assert num_groups(num_heads, num_heads, replace(spec, v_in_k=False)) == num_heads
