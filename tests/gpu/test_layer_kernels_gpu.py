"""The Triton kernels of the layers on a GPU, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.layer_cases import (
    Heads,
    check_add_post_norm,
    check_add_rms_norm,
    check_embed,
    check_gated_mul,
    check_heads,
    check_rms_norm,
    check_soft_cap,
    send,
)

from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.embedding import embed
from minisgl.kernels.elementwise.heads import qk_norm_rope_store_kv
from minisgl.kernels.elementwise.norm import add_rms_norm, rms_norm
from minisgl.kernels.elementwise.reference import NormRope

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 3, 17, 256, 1023, 2048]


def test_a_gpu_selects_the_triton_layer_kernels() -> None:
    assert dispatch._kernels_for(GPU) == dispatch.triton_kernels()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100, 896, 1024, 2560, 4096, 5120])
@pytest.mark.parametrize("num_rows", ROWS)
def test_embedding_matches_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_embed(num_rows, size, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100, 1024, 2560, 4096, 5120, 8192])
@pytest.mark.parametrize("num_rows", ROWS)
def test_rms_norms_match_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_rms_norm(num_rows, size, dtype, GPU)
    check_add_rms_norm(num_rows, size, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [37, 3072, 9728, 14336, 17408])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_mul_matches_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, gelu: bool
) -> None:
    check_gated_mul(num_rows, size, dtype, GPU, gelu=gelu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100, 2816, 5376])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("num_norms", "inner", "scaled"), [(1, False, False), (1, True, True), (3, False, True)]
)
def test_post_norms_match_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, num_norms: int, inner: bool, scaled: bool
) -> None:
    check_add_post_norm(num_rows, size, dtype, GPU, num_norms=num_norms, inner=inner, scaled=scaled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1000), (300, 262_144)])
def test_soft_caps_match_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_soft_cap(num_rows, size, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "v_is_k"),
    [(32, 16, 256, False), (32, 4, 512, True), (16, 2, 512, True), (5, 1, 96, True)],
)
@pytest.mark.parametrize("num_rows", ROWS)
def test_values_that_are_normed_or_keys_match_the_reference(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_is_k: bool,
    dtype: torch.dtype,
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim, True, True, v_is_k)
    check_heads(num_rows, heads, 16, dtype, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(14, 2, 64), (16, 8, 128), (40, 8, 128), (64, 8, 128), (5, 1, 128), (32, 8, 96), (8, 4, 256)],
)
@pytest.mark.parametrize("num_rows", ROWS)
def test_qk_norm_rope_store_matches_the_reference(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    check_heads(num_rows, Heads(num_heads, num_kv_heads, head_dim, normed), 16, dtype, GPU)


def test_gated_mul_of_more_than_2_to_the_31_elements_is_right() -> None:
    """Rows so far into a tensor that their distance from its start needs 64 bits."""
    num_rows, size = 2**31 // 51200 + 20, 25600
    gate_up = torch.randn(num_rows, 2 * size, device=GPU, dtype=torch.bfloat16)
    out = gated_mul(gate_up)
    assert torch.equal(out[-9:], gated_mul(gate_up[-9:].contiguous()))


def test_embeddings_of_more_than_2_to_the_31_elements_are_right() -> None:
    size = 8192
    weight = torch.randn(2**31 // size + 10, size, device=GPU, dtype=torch.bfloat16)
    token_ids = torch.tensor([len(weight) - 1, 0, len(weight) - 9], device=GPU)
    assert torch.equal(embed(token_ids, weight), weight[token_ids])


def test_kv_caches_of_more_than_2_to_the_31_elements_are_stored_to_correctly() -> None:
    num_heads, head_dim, page_size = 8, 128, 16
    num_pages = 2**31 // (page_size * num_heads * head_dim) + 2
    shape = (2, num_pages, page_size, num_heads, head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=torch.bfloat16, device=GPU)
    qkv, table = torch.randn(1, 3 * num_heads * head_dim), torch.ones(4, head_dim)
    last = torch.tensor([num_pages * page_size - 1])
    qkv_there, table_there, zero, slot = send(
        GPU, qkv.bfloat16(), table, torch.zeros_like(last), last
    )
    qk_norm_rope_store_kv(qkv_there, zero, slot, k_cache, v_cache, NormRope(table_there))
    value = qkv_there[0, -num_heads * head_dim :].view(num_heads, head_dim)
    assert torch.equal(v_cache[-1, -1], value)


def test_overlapping_captured_launches_give_what_separate_ones_do() -> None:
    """A chain in which each kernel reads what the one before wrote, with every launch overlapping
    the next, gives to the bit what it gives without. The token ids are written right before."""
    num_rows, num_heads, head_dim, num_layers = 48, 16, 128, 30
    size = num_heads * head_dim
    x, weight, table = send(
        GPU,
        torch.randn(num_rows, size).bfloat16(),
        (1 + 0.1 * torch.randn(size)).bfloat16(),
        torch.rand(64, head_dim),
    )
    rows = torch.arange(num_rows)
    head_weight, positions, slots = send(GPU, torch.ones(head_dim).bfloat16(), rows, rows + 16)
    caches = torch.zeros(2, 4, 16, 1, head_dim, dtype=torch.bfloat16, device=GPU)
    gate, keys = x.flip(0).contiguous(), x[:, : 2 * head_dim].contiguous()
    token_ids, last = torch.zeros_like(positions), torch.full_like(positions, num_rows - 1)

    norm_rope = NormRope(table, head_weight, head_weight, 1e-6)

    def chain(*, pdl: bool) -> torch.Tensor:
        token_ids.zero_()
        torch.sub(last, positions, out=token_ids)
        residual = embed(token_ids, x, pdl=pdl)
        delta = rms_norm(residual, weight, 1e-6, pdl=pdl)
        for _ in range(num_layers):
            normed, _ = add_rms_norm(delta, residual, weight, 1e-6, pdl=pdl)
            qkv = torch.cat((normed, keys), dim=1)
            q = qk_norm_rope_store_kv(qkv, positions, slots, *caches, norm_rope, pdl=pdl)
            normed, _ = add_rms_norm(q.flatten(1), residual, weight, 1e-6, pdl=pdl)
            normed = rms_norm(normed, weight, 1e-6, pdl=pdl)
            delta = gated_mul(torch.cat((gate, normed), dim=1), pdl=pdl)
        return torch.cat((delta, residual))

    wanted = chain(pdl=False).clone()
    chain(pdl=True)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(pdl=True)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
