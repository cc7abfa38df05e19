"""The Triton kernels against TorchAttention, in Triton's interpreter where there is no GPU.

bfloat16, which the interpreter rounds in its own way, and long rows are in tests/gpu.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.attention_cases import (
    Shape,
    assert_close,
    assert_rounded_alike,
    check_decode,
    check_decode_qkv,
    check_decode_runs,
    check_prefill,
    forget_own,
    own_places,
    paged_cache,
    turned_and_attended,
)

from minisgl.attention.backends import make_attention
from minisgl.attention.base import (
    Attention,
    BatchSlots,
    DecodeBatch,
    ForwardBatch,
    PrefillBatch,
)
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.kernels import dispatch
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments
from minisgl.kernels.tuning import DecodeTiles, PrefillTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = DecodeTiles(block_n=32, num_warps=4, num_stages=2, programs_per_sm=16, min_split=64)
# Every group, every head size and every page size.
SHAPES = [
    Shape(group, head_dim, page_size, num_kv_heads=1 + group % 2, device=DEVICE)
    for group, head_dim, page_size in [
        (1, 64, 1), (2, 64, 4), (4, 64, 16), (5, 64, 64),
        (7, 96, 1), (8, 96, 4), (16, 96, 16), (1, 96, 64),
        (2, 128, 1), (4, 128, 4), (5, 128, 16), (8, 128, 64), (16, 128, 32), (2, 64, 256),
    ]
]  # fmt: skip

QKV_SHAPES = [
    Shape(group, head_dim, page_size, num_kv_heads=1 + group % 2, device=DEVICE)
    for group, head_dim, page_size in [
        (1, 64, 1), (2, 128, 16), (3, 80, 3), (5, 128, 64), (8, 64, 16), (18, 64, 4),
    ]
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_matches_the_reference(shape: Shape) -> None:
    """Shares begin and end at 64, 128 and so on; pages at multiples of their size."""
    check_decode(TritonAttention(TILES), shape, [1, 63, 64, 65, 129, 200])
    check_decode(TritonAttention(), shape, [257, 2, 17, 127, 128, 16], seed=1)


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("shape", QKV_SHAPES, ids=str)
def test_fused_rope_store_decode_matches_the_reference(shape: Shape, normed: bool) -> None:
    """Rows of nothing, of their own token alone, and with it alone in their last share (193)."""
    check_decode_qkv(TritonAttention(TILES), shape, [1, 193, 0, 2, 64, 65, 48], normed=normed)
    check_decode_qkv(TritonAttention(), shape, [0, 257, 17, 128, 16], normed=normed, seed=1)


@pytest.mark.parametrize("lengths", [[1], [0, 0], [2], [16], [17]], ids=str)
def test_fused_rope_store_decode_of_few_rows_matches_the_reference(lengths: list[int]) -> None:
    check_decode_qkv(TritonAttention(), Shape(2, 64, 16, device=DEVICE), lengths, normed=True)


@pytest.mark.parametrize("programs_per_sm", [1, 64])
def test_fused_rope_store_decode_matches_the_reference_for_any_number_of_splits(
    programs_per_sm: int,
) -> None:
    tiles = DecodeTiles(16, 4, num_stages=2, programs_per_sm=programs_per_sm, min_split=16)
    shape = Shape(3, 64, 16, device=DEVICE)
    for normed, lengths in ((True, [200, 1, 0, 129]), (False, [257])):
        check_decode_qkv(TritonAttention(tiles), shape, lengths, normed=normed)


def test_fused_decode_is_right_where_all_scores_are_far_below_zero() -> None:
    """Where all keys point away from the query, the own one too, a share that has no own key must
    not take its score for 0. The scores are near -100: much lower, and float32 would round them by
    more than the result may differ."""
    shape = Shape(1, 64, 16, num_kv_heads=1, device=DEVICE)
    kv, table = paged_cache(shape, [300])
    rows = DecodeBatch(table, torch.tensor([300], dtype=torch.int32, device=DEVICE), 300)
    qkv, norm_rope = shape.qkv(1), shape.norm_rope(300, normed=False)
    qkv[:, 64:128] = -10 * qkv[:, :64]
    _, stored = turned_and_attended(qkv, kv, rows, norm_rope, shape)
    kv.k.mul_(0.1).add_(stored.k.flatten(0, 1)[own_places(kv, rows)[2]])
    forget_own(kv, rows)
    expected, _ = turned_and_attended(qkv, kv, rows, norm_rope, shape)
    out = TritonAttention(TILES).decode(shape.call(qkv, kv, norm_rope), rows)
    assert_close(out, expected, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_matches_the_reference(shape: Shape) -> None:
    """Whole prompts, prefixes in the cache, and single tokens, around pages and tiles."""
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 17), (63, 2), (64, 1), (15, 16)])
    check_prefill(TritonAttention(), shape, [(130, 33), (0, 65)], seed=1)


def test_float16_matches_the_reference() -> None:
    shape = Shape(2, 64, 16, dtype=torch.float16, device=DEVICE)
    check_decode(TritonAttention(), shape, [1, 33, 300])
    for normed in (False, True):
        check_decode_qkv(TritonAttention(), shape, [1, 33, 300, 0], normed=normed)
    check_prefill(TritonAttention(), shape, [(0, 150), (57, 20), (128, 1)])


@pytest.mark.parametrize("programs_per_sm", [1, 2, 64])
def test_decode_matches_the_reference_for_any_number_of_splits(programs_per_sm: int) -> None:
    """A whole row each, and at last shares of the least size, more than are merged at once."""
    tiles = DecodeTiles(16, 4, num_stages=2, programs_per_sm=programs_per_sm, min_split=16)
    check_decode(TritonAttention(tiles), Shape(2, 64, 16, device=DEVICE), [700, 1, 128, 129])


RUNS = [(1, 1), (1, 4), (0, 0), (30, 3), (63, 2), (64, 4), (700, 4), (129, 1), (16, 2)]


@pytest.mark.parametrize("programs_per_sm", [1, 64])
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"), [(1, 64, 1), (2, 128, 16), (5, 64, 64), (8, 96, 4)]
)
def test_the_rows_of_a_run_see_the_keys_up_to_their_own(
    group: int, head_dim: int, page_size: int, programs_per_sm: int
) -> None:
    tiles = DecodeTiles(16, 4, num_stages=2, programs_per_sm=programs_per_sm, min_split=16)
    shape = Shape(group, head_dim, page_size, num_kv_heads=1 + group % 2, device=DEVICE)
    check_decode_runs(TritonAttention(tiles), shape, 4, RUNS)


def test_longer_runs_and_those_of_many_heads_see_the_same() -> None:
    runs = [(10, 6), (300, 8), (5, 1), (0, 0)]
    check_decode_runs(TritonAttention(TILES), Shape(2, 64, 16, device=DEVICE), 8, runs)
    check_decode_runs(TritonAttention(TILES), Shape(8, 64, 16, device=DEVICE), 8, runs)
    check_decode_runs(TritonAttention(TILES), Shape(2, 64, 16, device=DEVICE, window=9), 8, runs)
    sinks = Shape(2, 64, 16, device=DEVICE, has_sinks=True, softcap=20.0)
    check_decode_runs(TritonAttention(TILES), sinks, 4, RUNS)


def test_a_long_row_beside_many_short_ones_matches_the_reference() -> None:
    """Rows beyond those that one look finds, and items of all."""
    lengths = [1 + i % 3 for i in range(299)] + [600]
    check_decode(TritonAttention(TILES), Shape(1, 64, 16, num_kv_heads=1, device=DEVICE), lengths)


def test_one_backend_object_serves_calls_of_any_shape() -> None:
    """The workspace grows and is used again."""
    backend = TritonAttention(TILES)
    for seed, (lengths, group) in enumerate([([300], 2), ([150] * 4, 4), ([70, 200], 1)]):
        shape = Shape(group, 64, 16, device=DEVICE)
        check_decode(backend, shape, lengths, seed)
        check_prefill(backend, shape, [(n // 2, n - n // 2) for n in lengths], seed)


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 3)],
        [(30, 1), (0, 16), (5, 17), (40, 15), (0, 33)],
        [(3, 0), (7, 5), (0, 0), (0, 0), (20, 9), (1, 0)],
        [(i, i % 3) for i in range(260)],
    ],
    ids=["one", "full", "some empty", "many"],
)
def test_prefill_without_host_lengths_matches_the_reference(
    chunks: list[tuple[int, int]], block_m: int
) -> None:
    """As in a captured step: with empty chunks, and with rows that belong to none, whose queries
    are not numbers, and whose pages are nowhere."""
    shape = Shape(2, 64, 4, num_kv_heads=1, device=DEVICE)
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks])
    known = PrefillBatch.of(table, *zip(*chunks, strict=True))
    unknown = replace(known, starts=(), lengths=(), num_rows=known.num_rows + 50)
    q = shape.queries(unknown.num_rows)
    q[known.num_rows :] = torch.nan
    tiles = PrefillTiles(block_m, block_n=16, num_warps=4, num_stages=2)
    out = TritonAttention(prefill=tiles).prefill(shape.call(q, kv), unknown)
    assert out.shape == q.shape
    expected = TorchAttention().prefill(shape.call(q[: known.num_rows], kv), known)
    assert_close(out[: known.num_rows], expected, shape)


def test_prefill_of_empty_chunks_leaves_padding_rows() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [5, 5])
    rows = replace(PrefillBatch.of(table, (5, 5), (0, 0)), num_rows=7)
    assert TritonAttention().prefill(shape.call(shape.queries(7), kv), rows).shape[0] == 7


def test_rows_without_keys_give_zeros() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [100, 5])
    lengths = torch.tensor([100, 0], dtype=torch.int32, device=DEVICE)
    rows = DecodeBatch(table, lengths, 100)
    out = TritonAttention(TILES).decode(shape.call(shape.queries(2), kv), rows)
    assert out[0].abs().min() > 0 and (out[1] == 0).all()


def test_the_result_of_a_row_is_independent_of_its_place_in_the_batch() -> None:
    """To the bit."""
    shape = Shape(4, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [300, 40, 129])
    q, backend = shape.queries(3), TritonAttention(TILES)
    lengths = torch.tensor([300, 40, 129], dtype=torch.int32, device=DEVICE)
    together = backend.decode(shape.call(q, kv), DecodeBatch(table, lengths, 300))
    order = torch.tensor([2, 0, 1], device=DEVICE)
    rows = DecodeBatch(table[order], lengths[order], 300)
    assert torch.equal(backend.decode(shape.call(q[order], kv), rows), together[order])


def test_empty_batches_give_empty_results() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [5])
    rows = DecodeBatch(table[:0], torch.empty(0, dtype=torch.int32, device=DEVICE), 0)
    assert TritonAttention().decode(shape.call(shape.queries(0), kv), rows).shape[0] == 0
    chunks = PrefillBatch.of(table[:0], (), ())
    assert TritonAttention().prefill(shape.call(shape.queries(0), kv), chunks).shape[0] == 0


@pytest.mark.parametrize("num_chunk_rows", [0, 5])
def test_only_pure_decode_steps_fuse_rope_and_store_into_attention(
    num_chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend in a step of decode rows alone, and only there: beside a chunk, all rows are
    turned before. The result is the same."""
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [70, 1, 20])
    lengths = torch.tensor([70, 1], dtype=torch.int32, device=DEVICE)
    rows = DecodeBatch(table[:2], lengths, 70)
    qkv, norm_rope = shape.qkv(2 + num_chunk_rows), shape.norm_rope(70, normed=True)
    forget_own(kv, rows)
    expected, expected_kv = turned_and_attended(qkv[:2], kv, rows, norm_rope, shape)
    _, positions, slots = own_places(kv, rows)
    chunk = torch.arange(20 - num_chunk_rows, 20, device=DEVICE)
    chunk_slots = table[2].long()[chunk // 16] * 16 + chunk % 16
    chunks = PrefillBatch.of(table[2:], (20 - num_chunk_rows,), (num_chunk_rows,))
    both = torch.cat((positions, chunk))
    of_all = Rows.of(torch.zeros_like(both), both)
    inputs = ForwardBatch(
        token_ids=positions,  # not looked at
        rows=of_all,
        own=of_all,
        slot_mapping=torch.cat((slots, chunk_slots)),
        decodes=rows,
        chunks=chunks if num_chunk_rows else PrefillBatch.of(table[:0], (), ()),
        slots=BatchSlots(positions, Segments(chunk, chunk, chunk)),  # not looked at
    )
    turned: list[int] = []
    qk_norm_rope_store_kv = dispatch.qk_norm_rope_store_kv

    def recorded(qkv: Tensor, *args: Any) -> Tensor:
        turned.append(qkv.shape[0])
        return qk_norm_rope_store_kv(qkv, *args)

    monkeypatch.setattr(dispatch, "qk_norm_rope_store_kv", recorded)
    attention = Attention(TorchAttention(), TritonAttention())
    out = attention(shape.call(qkv, kv, norm_rope), inputs)
    assert turned == ([qkv.shape[0]] if num_chunk_rows else [])
    assert_close(out[:2], expected, shape)
    own_keys = kv.k.flatten(0, 1)[slots].cpu()
    assert_rounded_alike(own_keys, expected_kv.k.flatten(0, 1)[slots].cpu())


def test_the_backend_is_created_by_its_name() -> None:
    attention = make_attention("triton", "torch")
    assert isinstance(attention.prefill_backend, TritonAttention)
