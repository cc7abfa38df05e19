"""The Triton kernels on a GPU: every dtype, long rows, large batches and CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

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

from minisgl.attention.base import DecodeBatch, PrefillBatch
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention, prefill_tiles
from minisgl.config import KVScales
from minisgl.kernels.linear.dense_gemm import linear
from minisgl.kernels.linear.dense_tiles import allocate_workspace
from minisgl.kernels.tuning import H200

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = [1, 2, 4, 5, 7, 8, 16]


def cuda(group: int, head_dim: int, page_size: int, dtype: torch.dtype) -> Shape:
    return Shape(group, head_dim, page_size, num_kv_heads=4, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_size_and_page_size_matches_the_reference(
    head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    shape = cuda(4, head_dim, page_size, dtype)
    check_decode(TritonAttention(), shape, [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 1000])
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 64), (63, 66), (300, 129), (1000, 1)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_every_gqa_group_size_matches_the_reference(group: int, dtype: torch.dtype) -> None:
    shape = cuda(group, 128, 16, dtype)
    check_decode(TritonAttention(), shape, [1, 31, 32, 33, 500, 2047])
    check_prefill(TritonAttention(), shape, [(0, 300), (17, 40), (511, 2), (5, 1)])


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"),
    [(1, 64, 1), (2, 128, 16), (3, 80, 3), (5, 128, 64), (8, 256, 1), (17, 64, 16)],
)
def test_fused_rope_store_decode_matches_the_reference(
    group: int, head_dim: int, page_size: int, normed: bool
) -> None:
    """Rows of nothing, of their own token alone, and around the ends of pages and shares."""
    shape = cuda(group, head_dim, page_size, torch.bfloat16)
    lengths = [0, 1, 2, 16, 17, 63, 64, 65, 128, 129, 193, 1000]
    check_decode_qkv(TritonAttention(), shape, lengths, normed=normed)
    check_decode_qkv(TritonAttention(), shape, [3000], normed=normed, seed=1)
    check_decode_qkv(TritonAttention(), shape, [1], normed=normed, seed=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 33, 256, 300])
def test_large_decode_batches_match_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    draw = random.Random(num_rows)
    lengths = [draw.randint(1, 1500) for _ in range(num_rows)]
    check_decode(TritonAttention(), cuda(2, 128, 64, dtype), lengths)
    check_decode_qkv(TritonAttention(), cuda(2, 128, 16, dtype), lengths, normed=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_beside_short_ones_match_the_reference(dtype: torch.dtype) -> None:
    for page_size in (1, 64):
        shape = cuda(4, 128, page_size, dtype)
        check_decode(TritonAttention(), shape, [32768, 1, 100, 20001])
        check_prefill(TritonAttention(), shape, [(32000, 65), (0, 3000), (7000, 1)])


def test_decode_is_bitwise_deterministic() -> None:
    """The result does not depend on which split of a row finishes last."""
    shape = cuda(2, 128, 16, torch.bfloat16)
    kv, table = paged_cache(shape, [3000, 700, 129] * 5)
    lengths = torch.tensor([3000, 700, 129] * 5, dtype=torch.int32, device="cuda")
    rows, q, backend = DecodeBatch(table, lengths, 3000), shape.queries(15), TritonAttention()
    first = backend.decode(shape.call(q, kv), rows)
    for _ in range(200):
        assert torch.equal(backend.decode(shape.call(q, kv), rows), first)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_captured_decode_is_right_at_any_lengths(num_rows: int) -> None:
    shape = cuda(2, 128, 16, torch.bfloat16)
    draw = random.Random(0)
    longest = [draw.randint(1, 4000) for _ in range(15)] + [32768]
    kv, full_table = paged_cache(shape, longest)
    limits = torch.tensor(longest, device="cuda")
    table = torch.zeros_like(full_table[:num_rows])  # the scratch page, as of padded rows
    lengths = torch.ones(num_rows, dtype=torch.int32, device="cuda")
    q = shape.queries(num_rows)
    backend, rows = TritonAttention(), DecodeBatch(table, lengths, 32768)
    kv.k[0], kv.v[0] = 0, 0
    backend.decode(shape.call(q, kv), rows)  # compiles, and makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode(shape.call(q, kv), rows)
    for turn in range(6):
        # The longest row first, whole: then everything that it left behind must not matter.
        order = torch.arange(15, 15 - num_rows, -1) if turn == 0 else torch.randperm(16)[:num_rows]
        order = order.to("cuda")
        shares = torch.rand(num_rows, device="cuda") if turn else 1
        table.copy_(full_table[order])
        lengths.copy_((limits[order] * shares).clamp(min=1))
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, TorchAttention().decode(shape.call(*in_float32(q, kv)), rows), shape)
        assert torch.equal(out, backend.decode(shape.call(q, kv), rows))


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_captured_fused_rope_store_decode_is_right_at_any_lengths(num_rows: int) -> None:
    """Captured of no tokens at all, as padded rows have."""
    shape = cuda(2, 128, 16, torch.bfloat16)
    draw = random.Random(0)
    longest = [draw.randint(1, 4000) for _ in range(15)] + [32768]
    kv, full_table = paged_cache(shape, longest)
    limits = torch.tensor(longest, device="cuda")
    table = torch.zeros_like(full_table[:num_rows])
    lengths = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    qkv, norm_rope = shape.qkv(num_rows), shape.norm_rope(32768, normed=True)
    backend, rows = TritonAttention(), DecodeBatch(table, lengths, 32768)
    backend.decode(shape.call(qkv, kv, norm_rope), rows)  # compiles, makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode(shape.call(qkv, kv, norm_rope), rows)
    full_kv = PagedKV(kv.k.clone(), kv.v.clone())
    for turn in range(6):
        order = torch.arange(15, 15 - num_rows, -1) if turn == 0 else torch.randperm(16)[:num_rows]
        order = order.to("cuda")
        shares = torch.rand(num_rows, device="cuda") if turn else 1
        table.copy_(full_table[order])
        lengths.copy_((limits[order] * shares).clamp(min=1))
        lengths[1:][turn::4] = 0
        kv.k.copy_(full_kv.k)
        kv.v.copy_(full_kv.v)
        forget_own(kv, rows)
        qkv.copy_(torch.randn_like(qkv))
        out.fill_(torch.nan)
        expected, expected_kv = turned_and_attended(qkv, kv, rows, norm_rope, shape)
        torch.cuda.synchronize()  # lengths and pages are to be older than the launch before
        graph.replay()
        assert_close(out, expected, shape)
        assert_stored(kv, expected_kv, rows)
        assert torch.equal(out, backend.decode(shape.call(qkv, kv, norm_rope), rows))


def no_chunks(page_table: Tensor, num_rows: int) -> PrefillBatch:
    """With room for as many chunks as the table has rows, as a graph is captured of it."""
    bounds = torch.zeros(len(page_table) + 1, dtype=torch.int32, device=page_table.device)
    return PrefillBatch(
        page_table=torch.zeros_like(page_table),
        row_starts=bounds,
        ends=torch.zeros_like(bounds[1:]),
        num_rows=num_rows,
        starts=(),
        lengths=(),
    )


def take_chunks(rows: PrefillBatch, q: Tensor, known: PrefillBatch) -> None:
    """Let captured `rows` be the chunks of `known`, with new queries."""
    num_chunks = len(known.lengths)
    rows.page_table[:num_chunks] = known.page_table
    rows.ends[:num_chunks] = known.ends
    rows.row_starts.fill_(known.num_rows)
    rows.row_starts[:num_chunks] = known.row_starts[:-1]
    q.copy_(torch.randn_like(q))
    q[known.num_rows :] = torch.nan


def check_chunks(out: Tensor, q: Tensor, kv: PagedKV, known: PrefillBatch, shape: Shape) -> None:
    """`out` was NaN, and only rows of chunks have been written."""
    assert out[known.num_rows :].isnan().all()
    if known.lengths:
        real, real_kv = in_float32(q[: known.num_rows], kv)
        expected = TorchAttention().prefill(shape.call(real, real_kv), known)
        assert_close(out[: known.num_rows], expected, shape)


@pytest.mark.parametrize("group", [2, 5])
def test_a_captured_prefill_is_right_for_any_chunks(group: int) -> None:
    """Captured of no chunks at all, with room for 8 of 600 rows together."""
    shape = cuda(group, 128, 16, torch.bfloat16)
    num_rows, draw = 600, random.Random(0)
    kv, full_table = paged_cache(shape, [4000] * 12)
    rows = no_chunks(full_table[:8], num_rows)
    q, backend = shape.queries(num_rows), TritonAttention()
    backend.prefill(shape.call(q, kv), rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.prefill(shape.call(q, kv), rows)
    for lengths in ([600], [1, 64, 63, 0, 129], [1] * 8, [0, 300, 0, 300], [], [7, 500, 3]):
        starts = [draw.randint(0, 4000 - length) for length in lengths]
        order = torch.randperm(12, device="cuda")[: len(lengths)]
        known = PrefillBatch.of(full_table[order], starts, lengths)
        take_chunks(rows, q, known)
        out.fill_(torch.nan)
        graph.replay()
        check_chunks(out, q, kv, known, shape)


@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "dtype", "fp8"),
    [
        (1, 64, 1, torch.bfloat16, False),
        (2, 128, 16, torch.float16, False),
        (3, 80, 3, torch.bfloat16, True),
        (5, 128, 64, torch.bfloat16, False),
        (5, 128, 16, torch.bfloat16, True),
        (8, 256, 7, torch.bfloat16, False),
        (8, 256, 16, torch.float16, True),
        (16, 96, 16, torch.float32, False),
    ],
)
def test_split_chunks_match_the_reference(
    group: int, head_dim: int, page_size: int, dtype: torch.dtype, fp8: bool
) -> None:
    """Contexts of nothing, of less than a split and of many, alone and beside each other."""
    shape = cuda(group, head_dim, page_size, dtype)
    if fp8:
        shape = replace(shape, kv_scales=KVScales(k=0.02, v=0.013))
    backend = TritonAttention()
    check_prefill(backend, shape, [(8192, 65)])
    check_prefill(backend, shape, [(20000, 1), (0, 3), (2047, 16), (1023, 1), (2048, 2)], seed=1)


@pytest.mark.parametrize("seed", range(24))
def test_random_split_chunks_match_the_reference(seed: int) -> None:
    """With few keys a split, so that up to as many programs as there are SMs merge one tile."""
    draw = random.Random(seed)
    shape = cuda(draw.choice([2, 5]), 128, draw.choice([3, 16]), torch.bfloat16)
    tiles = replace(
        prefill_tiles(128, 2, H200),
        min_split=draw.choice([64, 128, 1000]),
        programs_per_sm=draw.choice([1, 2, 4]),
    )
    backend = TritonAttention(prefill=tiles)
    for turn in range(4):
        chunks = [
            (draw.choice([0, draw.randint(0, 200), draw.randint(0, 9000)]), draw.randint(1, 40))
            for _ in range(draw.randint(1, 6))
        ]
        check_prefill(backend, shape, chunks, seed=4 * seed + turn)


def test_split_prefill_is_bitwise_deterministic() -> None:
    """The result depends neither on which split of an item finishes last, nor on what another
    launch left in the workspace; and equal sets of chunks give equal bits."""
    shape = cuda(5, 128, 16, torch.bfloat16)
    chunks = [(8192, 65), (30000, 1), (100, 7), (3000, 20)]
    kv, table = paged_cache(shape, [sum(chunk) for chunk in chunks])
    lengths = [length for _, length in chunks]
    qs, backend = shape.queries(sum(lengths)).split(lengths), TritonAttention()

    def run(order: list[int]) -> list[Tensor]:
        rows = PrefillBatch.of(table[order], *zip(*(chunks[i] for i in order), strict=True))
        out = backend.prefill(shape.call(torch.cat([qs[i] for i in order]), kv), rows)
        return list(out.split([lengths[i] for i in order]))

    first = run([0, 1, 2, 3])
    for turn in range(200):
        order = random.Random(turn).sample(range(4), 4)
        if turn % 10 == 0:
            run([order[0]])
        for i, out in zip(order, run(order), strict=True):
            assert torch.equal(out, first[i])


@pytest.mark.parametrize("num_rows", [64, 128, 256])
def test_a_captured_split_prefill_is_right_for_any_chunks(num_rows: int) -> None:
    """Captured of no chunks at all, with room for 16, as the runner does, and of several layers, so
    that launches follow each other on one workspace."""
    shape = cuda(5, 128, 16, torch.bfloat16)
    draw = random.Random(num_rows)
    kv, full_table = paged_cache(shape, [9000] * 15 + [40000])
    rows = no_chunks(full_table, num_rows)
    q, backend = shape.queries(num_rows), TritonAttention()
    backend.prefill(shape.call(q, kv), rows)  # compiles, and makes the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [backend.prefill(shape.call(q, kv), rows) for _ in range(6)]
    for lengths in ([num_rows], [1], [1] * 16, [0, 20, 0, 30], [], [7, 40, 3], [2, 60], [num_rows]):
        order = draw.sample(range(16), len(lengths))
        longest = [40000 if row == 15 else 9000 for row in order]
        starts = [
            draw.randint(0, most - length) for most, length in zip(longest, lengths, strict=True)
        ]
        known = PrefillBatch.of(full_table[order], starts, lengths)
        take_chunks(rows, q, known)
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()  # pages and bounds are to be older than the launch before
        graph.replay()
        check_chunks(outs[0], q, kv, known, shape)
        for out in outs[1:]:
            assert out[known.num_rows :].isnan().all()
            assert torch.equal(out[: known.num_rows], outs[0][: known.num_rows])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_before_any_step_of_chunks_is_refused() -> None:
    """Its replays would clear the semaphores of others."""
    shape = cuda(2, 128, 16, torch.bfloat16)
    kv, table = paged_cache(shape, [300])
    rows, q = PrefillBatch.of(table, (299,), (1,)), shape.queries(1)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="once before a graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        TritonAttention().prefill(shape.call(q, kv), rows)


def test_overlapping_launches_give_what_separate_ones_do() -> None:
    """Each reads what the one before wrote: in a graph, so that nothing but their waiting keeps
    them apart."""
    shape = cuda(2, 128, 16, torch.bfloat16)
    lengths = [3000, 700, 129, 1] * 4
    kv, table = paged_cache(shape, lengths)
    rows = DecodeBatch(table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), 3000)
    q = shape.queries(16)
    chunks = PrefillBatch.of(table, [length - 1 for length in lengths], [1] * 16)
    tiles = replace(prefill_tiles(128, 2, H200), min_split=64)  # so that some chunks are split

    def run(backend: TritonAttention) -> list[torch.Tensor]:
        outs = [q]
        for _ in range(8):
            outs.append(backend.decode(shape.call(outs[-1], kv), rows))
            outs.append(backend.prefill(shape.call(outs[-1], kv), chunks))
        return outs

    expected = run(TritonAttention(prefill=tiles, pdl=False))
    backend = TritonAttention(prefill=tiles)
    run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(backend)
    for _ in range(20):
        for out in outs[1:]:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_fused_decode_waits_for_the_projection_that_it_overlaps(num_rows: int) -> None:
    """As the layers of a model follow each other, but all with one cache, so that each writes what
    the one before wrote."""
    shape = cuda(2, 128, 16, torch.bfloat16)
    lengths = [3000, 700, 129, 1][:num_rows] * max(1, num_rows // 4)
    kv, table = paged_cache(shape, lengths)
    rows = DecodeBatch(table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), 3000)
    forget_own(kv, rows)
    first, norm_rope = shape.qkv(num_rows), shape.norm_rope(3000, normed=True)
    size = shape.num_kv_heads * shape.group * shape.head_dim
    weight = (torch.randn(first.shape[1], size, device="cuda") * 2 * size**-0.5).bfloat16()
    workspace = allocate_workspace([(first.shape[1], size)], num_rows, first.device)

    def run(backend: TritonAttention, *, pdl: bool) -> list[Tensor]:
        qkvs = [first]
        for _ in range(12):
            out = backend.decode(shape.call(qkvs[-1], kv, norm_rope), rows)
            qkvs.append(linear(out.flatten(1), weight, None, workspace=workspace, pdl=pdl))
        return qkvs

    torch.cuda.synchronize()
    expected = run(TritonAttention(pdl=False), pdl=False)
    expected_kv = [kv.k.clone(), kv.v.clone()]
    backend = TritonAttention()
    run(backend, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qkvs = run(backend, pdl=True)
    for _ in range(20):
        for qkv in qkvs[1:]:
            qkv.fill_(torch.nan)
        forget_own(kv, rows)
        torch.cuda.synchronize()
        graph.replay()
        assert all(torch.equal(qkv, right) for qkv, right in zip(qkvs, expected, strict=True))
        for cache, right in zip((kv.k, kv.v), expected_kv, strict=True):
            torch.testing.assert_close(cache, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_attention_never_synchronizes_with_the_device() -> None:
    shape = cuda(2, 128, 16, torch.bfloat16)
    kv, table = paged_cache(shape, [300, 40])
    lengths = torch.tensor([300, 40], dtype=torch.int32, device="cuda")
    q, chunks, backend = shape.queries(2), shape.queries(60), TritonAttention()
    qkv, norm_rope = shape.qkv(2), shape.norm_rope(300, normed=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            backend.decode(shape.call(q, kv), DecodeBatch(table, lengths, 300))
            backend.decode(
                shape.call(qkv, kv, norm_rope),
                DecodeBatch(table, lengths, 300),
            )
            rows = PrefillBatch.of(table, (260, 20), (40, 20))
            backend.prefill(shape.call(chunks, kv), rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
