"""The Triton kernels against TorchAttention, in Triton's interpreter where there is no GPU.

bfloat16, which the interpreter rounds in its own way, and long rows are in tests/gpu.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton")

from attention_cases import Shape, check_decode, check_prefill, paged_cache

from minisgl.attention.backends import make_attention
from minisgl.attention.base import ChunkRows, DecodeRows
from minisgl.attention.triton_backend import TritonAttention
from minisgl.kernels.triton_attention import DecodeTiles

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOT = DecodeTiles(block_n=32, num_warps=4, num_stages=2, use_dot=True, min_share=64)
LANES = DecodeTiles(block_n=32, num_warps=4, num_stages=2, use_dot=False, min_share=64)
# Every group, every head size and every page size.
SHAPES = [
    Shape(group, head_dim, page_size, num_kv_heads=1 + group % 2, device=DEVICE)
    for group, head_dim, page_size in [
        (1, 64, 1), (2, 64, 4), (4, 64, 16), (5, 64, 64),
        (7, 96, 1), (8, 96, 4), (16, 96, 16), (1, 96, 64),
        (2, 128, 1), (4, 128, 4), (5, 128, 16), (8, 128, 64), (16, 128, 32), (2, 64, 256),
    ]
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: Shape) -> None:
    """Shares begin and end at 64, 128 and so on; pages at multiples of their size."""
    check_decode(TritonAttention(DOT), shape, [1, 63, 64, 65, 129, 200])
    check_decode(TritonAttention(), shape, [257, 2, 17, 127, 128, 16], seed=1)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.group <= 2], ids=str)
def test_decode_on_cuda_cores(shape: Shape) -> None:
    check_decode(TritonAttention(LANES), shape, [1, 31, 32, 33, 64, 65, 129, 200])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape: Shape) -> None:
    """Whole prompts, prefixes in the cache, and single tokens, around pages and tiles."""
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 17), (63, 2), (64, 1), (15, 16)])
    check_prefill(TritonAttention(), shape, [(130, 33), (0, 65)], seed=1)


@pytest.mark.parametrize("use_dot", [True, False])
def test_float16(use_dot: bool) -> None:
    shape = Shape(2, 64, 16, dtype=torch.float16, device=DEVICE)
    tiles = DecodeTiles(64, num_warps=4, num_stages=3, use_dot=use_dot, min_share=128)
    check_decode(TritonAttention(tiles), shape, [1, 33, 300])
    check_prefill(TritonAttention(), shape, [(0, 150), (57, 20), (128, 1)])


@pytest.mark.parametrize("use_dot", [True, False])
@pytest.mark.parametrize("programs_per_sm", [1, 64])
def test_any_number_of_splits(use_dot: bool, programs_per_sm: int) -> None:
    """Two at least, with rows longer than two shares of the least size; or 64, mostly empty."""
    backend = TritonAttention(DOT if use_dot else LANES, programs_per_sm)
    check_decode(backend, Shape(2, 64, 16, device=DEVICE), [700, 1, 128, 129])


def test_one_backend_serves_any_calls() -> None:
    """The workspace grows and is used again; the work list belongs to its rows alone."""
    backend = TritonAttention(DOT)
    for seed, (lengths, group) in enumerate([([300], 2), ([150] * 4, 4), ([70, 200], 1)]):
        shape = Shape(group, 64, 16, device=DEVICE)
        check_decode(backend, shape, lengths, seed)
        check_prefill(backend, shape, [(n // 2, n - n // 2) for n in lengths], seed)


def test_the_layers_of_a_step_share_one_work_list() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [40])
    backend, rows = TritonAttention(), ChunkRows(table, (30,), (10,))
    q = shape.queries(10)
    first = backend.prefill(q, kv, rows, 0.3)
    work = backend._work
    assert torch.equal(backend.prefill(q, kv, rows, 0.3), first)
    assert backend._work is work
    halved = ChunkRows(table, (20,), (10,))
    assert not torch.equal(backend.prefill(q, kv, halved, 0.3), first)


def test_rows_without_keys_are_zeros() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [100, 5])
    lengths = torch.tensor([100, 0], dtype=torch.int32, device=DEVICE)
    for tiles in (DOT, LANES):
        out = TritonAttention(tiles).decode(
            shape.queries(2), kv, DecodeRows(table, lengths, 100), 0.3
        )
        assert out[0].abs().min() > 0 and (out[1] == 0).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """To the bit, for as many rows."""
    shape = Shape(4, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [300, 40, 129])
    q, backend = shape.queries(3), TritonAttention(DOT)
    lengths = torch.tensor([300, 40, 129], dtype=torch.int32, device=DEVICE)
    together = backend.decode(q, kv, DecodeRows(table, lengths, 300), 0.3)
    order = torch.tensor([2, 0, 0], device=DEVICE)
    rows = DecodeRows(table[order], lengths[order], 300)
    assert torch.equal(backend.decode(q[order], kv, rows, 0.3), together[order])


def test_nothing_to_do() -> None:
    shape = Shape(2, 64, 16, device=DEVICE)
    kv, table = paged_cache(shape, [5])
    rows = DecodeRows(table[:0], torch.empty(0, dtype=torch.int32, device=DEVICE), 0)
    assert TritonAttention().decode(shape.queries(0), kv, rows, 0.3).shape[0] == 0
    chunks = ChunkRows(table[:0], (), ())
    assert TritonAttention().prefill(shape.queries(0), kv, chunks, 0.3).shape[0] == 0


def test_it_is_made_by_name() -> None:
    attention = make_attention("triton", "torch")
    assert isinstance(attention.prefill_backend, TritonAttention)
