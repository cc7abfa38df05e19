"""Chunks whose keys are split over programs, against TorchAttention and against chunks that are not
split, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import random
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
    check_prefill,
    paged_cache,
)

from minisgl.attention.base import AttentionCall, PrefillBatch
from minisgl.attention.state import PagedKV
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention, prefill_splits
from minisgl.config import AttentionSpec, KVScales
from minisgl.kernels.attention.paged_common import SplitWorkspace
from minisgl.kernels.attention.paged_prefill import paged_prefill, split_room
from minisgl.kernels.tuning import H200, PrefillTiles, tuning_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = PrefillTiles(16, 16, num_warps=4, num_stages=2, min_split=32)
TARGET = 8  # splits of each KV head
SHAPE = Shape(2, 64, 4, num_kv_heads=1, device=DEVICE)


def batch_of(table: Tensor, chunks: Sequence[tuple[int, int]]) -> PrefillBatch:
    """chunks: (cached tokens, new tokens) of each."""
    return PrefillBatch.of(table, *zip(*chunks, strict=True))


def some_workspace(shape: Shape, tiles: PrefillTiles) -> SplitWorkspace:
    """With exactly the room for TARGET splits, and NaN in it."""
    room = split_room(TARGET, shape.num_kv_heads, shape.head_dim, tiles)
    workspace = SplitWorkspace.allocate(**room, device=torch.device(DEVICE))
    for part in (workspace.accs, workspace.peaks, workspace.totals):
        part.fill_(torch.nan)
    return workspace


def attend(
    q: Tensor,
    kv: PagedKV,
    rows: PrefillBatch,
    tiles: PrefillTiles,
    workspace: SplitWorkspace,
    spec: AttentionSpec = SHAPE.spec,
    sinks: Tensor | None = None,
) -> Tensor:
    return paged_prefill(
        q,
        kv.k,
        kv.v,
        rows.page_table,
        rows.row_starts,
        rows.ends,
        spec=spec,
        sinks=sinks,
        tiles=tiles,
        target_splits=TARGET,
        workspace=workspace,
        scales=kv.scales,
    )


class Splitting(TorchAttention):
    """A backend that splits chunks over the same number of programs on every device."""

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        kv = call.kv
        heads = Shape(1, kv.v.shape[3], kv.page_size, kv.k.shape[2])
        workspace = some_workspace(heads, TILES)
        return attend(call.q, kv, batch, TILES, workspace, call.spec, call.sinks)


def num_used(workspace: SplitWorkspace, tiles: PrefillTiles) -> int:
    """Number of partial tiles that were stored."""
    return int(workspace.peaks.view(-1, tiles.block_m).isfinite().all(1).sum())


@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "num_kv_heads", "dtype"),
    [
        (1, 64, 1, 2, torch.float32),
        (5, 128, 16, 1, torch.float32),
        (3, 80, 3, 2, torch.float32),
        (8, 64, 64, 1, torch.float16),
        (16, 96, 7, 1, torch.float32),
    ],
)
def test_split_chunks_match_the_reference(
    group: int, head_dim: int, page_size: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    """Contexts of nothing, of less than a split and of several, around their ends."""
    shape = Shape(group, head_dim, page_size, num_kv_heads, dtype, DEVICE)
    backend = Splitting()
    check_prefill(backend, shape, [(0, 2), (127, 1), (31, 3), (200, 1), (64, 2)])
    check_prefill(backend, shape, [(128, 4)], seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_split_chunks_of_an_fp8_cache_match_the_reference(dtype: torch.dtype) -> None:
    shape = Shape(5, 64, 3, 1, dtype, DEVICE, KVScales(k=0.02, v=0.013))
    check_prefill(Splitting(), shape, [(129, 4), (0, 2), (70, 1)])


def test_a_chunk_is_split_as_often_as_programs_and_keys_allow() -> None:
    """Of three items on 90 keys with 8 programs each has two splits, of one on 90 it has two of 32
    keys or more, and of one on 63 it has all keys."""
    for chunk, expected in [((90, 20), 6), ((90, 2), 2), ((58, 5), 0), ((0, 3), 0)]:
        kv, table = paged_cache(SHAPE, [sum(chunk)])
        rows, workspace = batch_of(table, [chunk]), some_workspace(SHAPE, TILES)
        q = SHAPE.queries(rows.num_rows)
        out = attend(q, kv, rows, TILES, workspace)
        assert num_used(workspace, TILES) == expected
        assert_close(out, TorchAttention().prefill(SHAPE.call(q, kv), rows), SHAPE)


@pytest.mark.parametrize("seed", range(8))
def test_random_chunks_without_host_lengths_match_the_reference(seed: int) -> None:
    """As in a captured step: empty chunks, rows of no chunk, which are not numbers and stay
    unwritten, and a workspace that nobody cleared, used again and again."""
    draw = random.Random(seed)
    chunks = [
        (draw.choice([0, draw.randint(0, 400), draw.randint(0, 50)]), draw.choice([0, 1, 1, 3, 19]))
        for _ in range(draw.randint(1, 6))
    ] + [(draw.randint(0, 300), 1)]
    kv, table = paged_cache(SHAPE, [sum(chunk) for chunk in chunks], seed)
    known, workspace = batch_of(table, chunks), some_workspace(SHAPE, TILES)
    unknown = replace(known, starts=(), lengths=())
    q = SHAPE.queries(known.num_rows + 20)
    q[known.num_rows :] = torch.nan
    out = attend(q, kv, unknown, TILES, workspace)[: known.num_rows]
    expected = TorchAttention().prefill(SHAPE.call(q[: known.num_rows], kv), known)
    assert_close(out, expected, SHAPE)
    assert (workspace.semaphores == 0).all()
    assert torch.equal(attend(q, kv, unknown, TILES, workspace)[: known.num_rows], out)


def test_splits_stay_within_the_workspace_for_any_chunks() -> None:
    """What lies behind it is not written, and every chunk has a program for each of its splits."""
    tiles = replace(TILES, min_split=1)
    draw = random.Random(0)
    for _ in range(12):
        lengths = [draw.choice([1, 2, 9]) for _ in range(draw.randint(1, 5))]
        chunks = [(draw.choice([0, 40, 17, draw.randint(0, 150)]), n) for n in lengths]
        kv, table = paged_cache(SHAPE, [sum(chunk) for chunk in chunks])
        rows, large = batch_of(table, chunks), some_workspace(SHAPE, tiles)
        q = SHAPE.queries(rows.num_rows)
        ends = {name: getattr(large, name).numel() for name in ("accs", "peaks", "totals")}
        large = SplitWorkspace(
            **{
                name: torch.cat((getattr(large, name), getattr(large, name)))
                for name in (*ends, "semaphores")
            }
        )
        assert_close(
            attend(q, kv, rows, tiles, large),
            TorchAttention().prefill(SHAPE.call(q, kv), rows),
            SHAPE,
        )
        for name, end in ends.items():
            assert getattr(large, name)[end:].isnan().all()


def test_splits_of_no_keys_add_nothing() -> None:
    """One tile of keys, and splits that are shorter."""
    tiles = replace(TILES, block_n=64, min_split=8)
    workspace = some_workspace(SHAPE, tiles)
    kv, table = paged_cache(SHAPE, [70])
    rows, q = batch_of(table, [(69, 1)]), SHAPE.queries(1)
    out = attend(q, kv, rows, tiles, workspace)
    assert num_used(workspace, tiles) == 8
    assert (workspace.totals.view(-1, tiles.block_m)[:, 0] == 0).sum() == 7
    assert_close(out, TorchAttention().prefill(SHAPE.call(q, kv), rows), SHAPE)


def test_chunks_too_short_to_split_give_the_bits_of_the_kernel_without_splits() -> None:
    chunks = [(50, 3), (0, 17), (10, 1), (5, 0), (30, 20)]
    kv, table = paged_cache(SHAPE, [sum(chunk) for chunk in chunks])
    rows = batch_of(table, chunks)
    q = SHAPE.queries(rows.num_rows)
    whole = TritonAttention(prefill=replace(TILES, programs_per_sm=0))
    able = TritonAttention(prefill=replace(TILES, min_split=64))
    assert torch.equal(
        able.prefill(SHAPE.call(q, kv), rows),
        whole.prefill(SHAPE.call(q, kv), rows),
    )


def test_the_result_of_a_chunk_is_independent_of_its_place_in_the_batch() -> None:
    """To the bit."""
    chunks = [(300, 1), (0, 4), (130, 3), (40, 2)]
    order = [2, 0, 3, 1]
    kv, table = paged_cache(SHAPE, [sum(chunk) for chunk in chunks])
    qs = SHAPE.queries(10).split([length for _, length in chunks])
    backend = Splitting()
    outs = backend.prefill(SHAPE.call(torch.cat(qs), kv), batch_of(table, chunks))
    outs = outs.split([length for _, length in chunks])
    rows = batch_of(table[order], [chunks[i] for i in order])
    turned = backend.prefill(SHAPE.call(torch.cat([qs[i] for i in order]), kv), rows)
    assert torch.equal(turned, torch.cat([outs[i] for i in order]))


def test_only_steps_of_few_programs_are_split() -> None:
    """40 query heads over 8 KV heads: a tile has 25 tokens, and 16 tiles keep 132 SMs busy."""
    tiles = H200.prefill_tiles[0][1]
    splits = [prefill_splits(rows, 1, 5, 8, tiles, H200) for rows in (1, 65, 375, 376, 4096)]
    assert splits == [16, 16, 16, 0, 0]
    assert [prefill_splits(65, chunks, 5, 8, tiles, H200) for chunks in (32, 33)] == [16, 0]
    assert prefill_splits(65, 1, 5, 8, replace(tiles, programs_per_sm=0), H200) == 0
    assert prefill_splits(65, 1, 5, 2, tiles, replace(H200, num_sms=40)) == 20


def test_the_first_step_makes_the_workspace_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its rows, so that memory is known before the cache is made, and captures need
    none."""
    made: list[int] = []
    allocate = SplitWorkspace.allocate

    def counted(**sizes: object) -> SplitWorkspace:
        workspace = allocate(**sizes)  # type: ignore[arg-type]
        made.append(workspace.accs.numel())
        return workspace

    monkeypatch.setattr(SplitWorkspace, "allocate", counted)
    backend, num_sms = TritonAttention(prefill=TILES), tuning_of(torch.device(DEVICE)).num_sms
    for chunks in ([(0, 40)], [(150, 2)], [(9, 1)] * 20):
        check_prefill(backend, SHAPE, chunks)
    assert made == [num_sms * TILES.block_m * SHAPE.head_dim]
