"""Windows, soft caps, sinks, and values of another width: the Triton kernels against
TorchAttention, in Triton's interpreter where there is no GPU.

What lies before a window is NaN, and its pages are outside the cache (support/attention_cases.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.attention_cases import (
    Shape,
    assert_close,
    check_blocks,
    check_decode,
    check_decode_qkv,
    check_prefill,
    paged_cache,
)

from minisgl.attention.base import AttentionCall, DecodeBatch, PrefillBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.kernels.attention.paged_common import SplitWorkspace
from minisgl.kernels.tuning import DecodeTiles, PrefillTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = KVScales(k=0.02, v=0.013)
# Small, so that there are several tiles and splits in a window.
TILES = DecodeTiles(block_n=16, num_warps=4, num_stages=2, programs_per_sm=16, min_split=16)
CHUNK_TILES = PrefillTiles(16, 16, num_warps=4, num_stages=2, programs_per_sm=0)
SPLIT_CHUNK_TILES = replace(CHUNK_TILES, programs_per_sm=4, min_split=32)
WHOLE, SPLIT = (TritonAttention(prefill=tiles) for tiles in (CHUNK_TILES, SPLIT_CHUNK_TILES))


def shape_of(group: int, head_dim: int, page_size: int, **features: object) -> Shape:
    return replace(Shape(group, head_dim, page_size, 1 + group % 2, device=DEVICE), **features)  # type: ignore[arg-type]


# Windows of one token, shorter than a page, as long as one, one longer, of several tiles and pages,
# and longer than every row.
WINDOWS = [
    shape_of(2, 64, page_size, window=window, has_sinks=window % 2 == 1)
    for page_size, window in [
        (16, 1), (16, 5), (16, 16), (16, 17), (1, 15), (3, 33), (64, 40), (32, 100), (16, 1000),
    ]
]  # fmt: skip
OTHERS = [
    shape_of(1, 64, 16, has_sinks=True),
    shape_of(5, 64, 16, softcap=3.0),
    shape_of(3, 64, 3, window=20, softcap=50.0, has_sinks=True),
    shape_of(8, 64, 16, window=20, has_sinks=True, dtype=torch.float16),
    shape_of(4, 64, 4, window=20, softcap=3.0, has_sinks=True, kv_scales=SCALES),
    shape_of(16, 80, 64, window=70, softcap=3.0, dtype=torch.float16, kv_scales=SCALES),
    shape_of(2, 256, 16, window=33),
    shape_of(2, 512, 16, softcap=30.0),
]
WIDTHS = [
    shape_of(2, 192, 16, value_dim=128),
    shape_of(3, 48, 4, value_dim=96, window=20, has_sinks=True, softcap=5.0),
    shape_of(4, 192, 16, value_dim=128, window=20, has_sinks=True, kv_scales=SCALES),
    shape_of(1, 64, 16, value_dim=80, dtype=torch.float16),
]


@pytest.mark.parametrize("shape", WINDOWS + OTHERS + WIDTHS, ids=str)
def test_decode_matches_the_reference(shape: Shape) -> None:
    check_decode(TritonAttention(TILES), shape, [1, 15, 16, 17, 33, 64, 130])
    check_decode(TritonAttention(), shape, [257, 2, 34], seed=1)


# The own token is normed in the same way, whatever is in front of the window.
@pytest.mark.parametrize(
    ("shape", "normed"),
    [
        *((shape, place % 2 == 1) for place, shape in enumerate(WINDOWS)),
        *((shape, normed) for shape in OTHERS for normed in (False, True)),
    ],
    ids=str,
)
def test_fused_rope_store_decode_matches_the_reference(shape: Shape, normed: bool) -> None:
    """Rows of nothing, as padded ones of a captured step, and of their own token; the others'
    windows begin in the first tile or later."""
    check_decode_qkv(TritonAttention(TILES), shape, [1, 0, 15, 17, 34, 130], normed=normed)
    check_decode_qkv(TritonAttention(), shape, [0, 257], normed=normed, seed=1)


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(2, 64, 16, norms_v=True, window=20),
        shape_of(3, 96, 4, norms_v=True, v_is_k=True),
        shape_of(4, 512, 16, norms_v=True, v_is_k=True, dtype=torch.float16),
        shape_of(4, 128, 16, norms_v=True, v_is_k=True, kv_scales=SCALES),
    ],
    ids=str,
)
def test_fused_decode_of_values_that_are_normed_or_keys(shape: Shape) -> None:
    check_decode_qkv(TritonAttention(TILES), shape, [1, 0, 15, 17, 34, 130], normed=True)
    check_decode_qkv(TritonAttention(TILES), replace(shape, norms_v=False), [0, 33], normed=False)


@pytest.mark.parametrize("backend", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("shape", WINDOWS + OTHERS + WIDTHS, ids=str)
def test_prefill_matches_the_reference(shape: Shape, backend: TritonAttention) -> None:
    """Whole prompts, and chunks that begin inside a window or where it begins inside of them."""
    check_prefill(backend, shape, [(0, 1), (0, 37), (15, 3), (16, 17), (130, 20)])
    check_prefill(backend, shape, [(150, 4)], seed=1)


@pytest.mark.parametrize("shape", WINDOWS + OTHERS + WIDTHS, ids=str)
def test_prefill_with_the_tiles_of_a_model_matches_the_reference(shape: Shape) -> None:
    check_prefill(TritonAttention(), shape, [(100, 33)], seed=2)


@pytest.mark.parametrize("shape", WINDOWS[1::3] + OTHERS + WIDTHS[1:3], ids=str)
def test_rows_that_see_later_ones_match_the_reference(shape: Shape) -> None:
    """Within their chunk: less than a tile of queries or keys, and several."""
    check_blocks(SPLIT, shape, [(0, 37), (15, 3), (16, 50)])
    check_blocks(TritonAttention(), shape, [(130, 20), (0, 1)], seed=1)


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_captured_chunks_match_the_reference(splits: bool) -> None:
    """Known only to the device, some of them empty, with rows that belong to none."""
    shape = shape_of(2, 64, 4, window=21, has_sinks=True)
    chunks = [(3, 0), (60, 5), (0, 0), (20, 9), (100, 1)]
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks], starts=[n for n, _ in chunks])
    known = PrefillBatch.of(table, *zip(*chunks, strict=True))
    unknown = replace(known, starts=(), lengths=(), num_rows=known.num_rows + 20)
    q = shape.queries(unknown.num_rows)
    q[known.num_rows :] = torch.nan
    out = (SPLIT if splits else WHOLE).prefill(shape.call(q, kv), unknown)
    q = q[: known.num_rows]
    expected = TorchAttention().prefill(shape.call(q, kv), known)
    assert_close(out[: known.num_rows], expected, shape)


def attend_alone(shape: Shape, sinks: Sequence[float], q: Tensor, length: int = 200) -> Tensor:
    """The attention of one row, split or not, of these heads."""
    kv, table = paged_cache(shape, [length])
    rows = DecodeBatch(table, torch.tensor([length], dtype=torch.int32, device=DEVICE), length)
    chunk = PrefillBatch.of(table, (length - 1,), (1,))
    given = torch.tensor(sinks, device=DEVICE)
    expected = TorchAttention().decode(AttentionCall(q, kv, shape.spec, given), rows)
    for out in (
        TritonAttention(TILES).decode(AttentionCall(q, kv, shape.spec, given), rows),
        WHOLE.prefill(AttentionCall(q, kv, shape.spec, given), chunk),
        SPLIT.prefill(AttentionCall(q, kv, shape.spec, given), chunk),
    ):
        assert_close(out, expected, shape)
    return expected


def test_sinks_of_any_size_count_once() -> None:
    """Far above the scores, so that hardly anything else counts, and far below."""
    shape = shape_of(3, 64, 16, has_sinks=True)
    q = shape.queries(1)
    assert attend_alone(shape, [500.0, 500.0, 500.0, -500.0, 0.0, 0.0], q)[0, :3].abs().max() == 0
    assert attend_alone(shape, [-500.0] * 6, 1000 * q).abs().max() > 0.1


def test_rows_without_keys_give_zeros_with_sinks() -> None:
    shape = shape_of(2, 64, 16, has_sinks=True, window=7)
    kv, table = paged_cache(shape, [40, 0])
    rows = DecodeBatch(table, torch.tensor([40, 0], dtype=torch.int32, device=DEVICE), 40)
    out = TritonAttention(TILES).decode(shape.call(shape.queries(2), kv), rows)
    assert out[0].abs().min() > 0 and (out[1] == 0).all()


@pytest.mark.parametrize(("length", "expected"), [(40, 3), (300, 6), (5000, 6)])
def test_the_splits_of_a_row_follow_its_window(
    monkeypatch: pytest.MonkeyPatch, length: int, expected: int
) -> None:
    """96 keys in splits of 16, however long the row is."""
    made: list[SplitWorkspace] = []
    allocate = SplitWorkspace.allocate

    def kept(**sizes: object) -> SplitWorkspace:
        made.append(allocate(**sizes))  # type: ignore[arg-type]
        made[-1].peaks.fill_(torch.nan)
        return made[-1]

    monkeypatch.setattr(SplitWorkspace, "allocate", kept)
    shape = shape_of(1, 64, 16, window=96, num_kv_heads=1)
    check_decode(TritonAttention(TILES), shape, [length])
    assert made[0].peaks.isfinite().sum() == expected


def test_sinks_must_be_given_exactly_if_the_layer_has_them() -> None:
    for shape, sinks in (
        (shape_of(2, 64, 16), torch.zeros(2, device=DEVICE)),
        (shape_of(2, 64, 16, has_sinks=True), None),
    ):
        kv, table = paged_cache(shape, [5])
        rows = DecodeBatch(table, torch.tensor([5], dtype=torch.int32, device=DEVICE), 5)
        chunk, q = PrefillBatch.of(table, (4,), (1,)), shape.queries(1)
        with pytest.raises(AssertionError):
            TritonAttention().decode(AttentionCall(q, kv, shape.spec, sinks), rows)
        with pytest.raises(AssertionError):
            TritonAttention().prefill(AttentionCall(q, kv, shape.spec, sinks), chunk)
