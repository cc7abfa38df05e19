"""The Triton kernels of the layers: on a GPU where there is one, or else in Triton's interpreter.

bfloat16 is left to tests/gpu, since the interpreter's is not exact.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support import gemma_checkpoints
from support.checkpoints import TOLERANCE, Case, make_case, relative_error, spec_named
from support.layer_cases import (
    Heads,
    check_add_post_norm,
    check_add_rms_norm,
    check_embed,
    check_gated_mul,
    check_heads,
    check_rms_norm,
    check_soft_cap,
)
from support.paged import PagedModel

from minisgl.attention.base import Attention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.kernels import dispatch
from minisgl.kernels.launch_options import pdl_options
from minisgl.kernels.linear import dense_tiles
from minisgl.kernels.linear.dense_product import DenseProduct, LinearKernels
from minisgl.kernels.linear.dense_tiles import allocate_workspace
from minisgl.kernels.tuning import H200
from minisgl.models.loader import load_model
from minisgl.models.registry import read_model_config
from minisgl.models.transformer import CausalLM

pytestmark = [
    # What overflows on the way becomes 0 or infinity in numpy too, but it says so.
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]
SIZES = [64, 100, 1000, 1024, 1536]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, *SIZES])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_embedding_matches_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_embed(num_rows, size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_rms_norms_match_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_rms_norm(num_rows, size, dtype, DEVICE)
    check_add_rms_norm(num_rows, size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100, 1536])
@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize(
    ("num_norms", "inner", "scaled"), [(1, False, False), (1, True, True), (3, False, True)]
)
def test_post_norms_match_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, num_norms: int, inner: bool, scaled: bool
) -> None:
    check_add_post_norm(
        num_rows, size, dtype, DEVICE, num_norms=num_norms, inner=inner, scaled=scaled
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 1000), (2, 2048)])
def test_soft_caps_match_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_soft_cap(num_rows, size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1024, 1500])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_mul_matches_the_reference(
    num_rows: int, size: int, dtype: torch.dtype, gelu: bool
) -> None:
    check_gated_mul(num_rows, size, dtype, DEVICE, gelu=gelu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 64), (14, 2, 64), (16, 8, 128), (5, 1, 128), (40, 8, 128), (6, 2, 96), (4, 1, 256)],
)
@pytest.mark.parametrize(("num_rows", "page_size"), [(1, 16), (3, 1), (17, 4)])
def test_qk_norm_rope_store_matches_the_reference(
    num_rows: int,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim, normed)
    check_heads(num_rows, heads, page_size, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("normed", "norms_v", "v_is_k"), [(True, True, False), (True, True, True), (False, False, True)]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (5, 1, 96), (32, 4, 512)]
)
def test_values_that_are_normed_or_keys_match_the_reference(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normed: bool,
    norms_v: bool,
    v_is_k: bool,
    dtype: torch.dtype,
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim, normed, norms_v, v_is_k)
    for num_rows in (1, 17):
        check_heads(num_rows, heads, 4, dtype, DEVICE)


def test_row_counts_above_the_tuned_threshold_match_the_reference() -> None:
    """The programs that take more at a time, with some left over at the end."""
    num_rows = H200.many_rows + 3
    check_embed(num_rows, 100, torch.float16, DEVICE)
    check_rms_norm(num_rows, 100, torch.float16, DEVICE)
    check_add_rms_norm(num_rows, 100, torch.float16, DEVICE)
    check_gated_mul(num_rows, 100, torch.float16, DEVICE)
    check_add_post_norm(num_rows, 100, torch.float16, DEVICE, num_norms=1, inner=True, scaled=True)


def test_empty_batches_are_accepted() -> None:
    check_embed(0, 64, torch.float32, DEVICE)
    check_rms_norm(0, 64, torch.float32, DEVICE)
    check_add_post_norm(0, 64, torch.float32, DEVICE, num_norms=1, inner=False, scaled=False)
    check_heads(0, Heads(4, 2, 64, True), 16, torch.float32, DEVICE)


def test_the_cpu_never_uses_overlapping_launches() -> None:
    assert pdl_options(torch.device("cpu"), True) == {"pdl": False}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the parity tests run these kernels")
@pytest.mark.parametrize(
    ("name", "few_rows"),
    [
        *[("llama", False), ("qwen2", False), ("qwen3", False), ("llama-biased", True)],
        *[("qwen3", True), ("deepseek-v2", False), ("glm-flash", True)],
    ],
)
def test_a_model_on_the_triton_kernels_matches_transformers(
    name: str, few_rows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_model(make_case(spec_named(name), tmp_path), monkeypatch, few_rows=few_rows)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the parity tests run these kernels")
@pytest.mark.parametrize(("name", "few_rows"), [("dense", True), ("experts", False)])
def test_gemma_on_the_triton_kernels_matches_transformers(
    name: str, few_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_model(gemma_checkpoints.case_of(name), monkeypatch, few_rows=few_rows)


def check_model(case: Case, monkeypatch: pytest.MonkeyPatch, *, few_rows: bool) -> None:
    """With or without the linear kernels. Pure decode steps fuse norm and RoPE into attention."""
    kernels, config = dispatch.triton_kernels(), read_model_config(case.folder)
    model = load_model(
        config,
        case.folder,
        dtype=torch.float32,
        device=DEVICE,
        load_format="safetensors",
        max_seq_len=256,
    )
    monkeypatch.setattr(dispatch, "_kernels_for", lambda device: kernels)
    if few_rows:
        for name in ("should_use", "should_fuse_norm"):
            monkeypatch.setattr(dense_tiles, name, lambda *args, gated: True)
        workspace = allocate_workspace([(1024, 1024)], 64, DEVICE)
        assert isinstance(model, CausalLM)
        for product in model._products():
            assert isinstance(product, DenseProduct)
            product.kernels = LinearKernels(H200, workspace, products=None)
    num_prefilled, num_tokens = 41, 43
    paged = PagedModel(model, config, page_size=16)
    paged.attention = Attention(TorchAttention(), TritonAttention())
    logits = paged.run(case.token_ids[:num_tokens], prefill=num_prefilled, chunk=20)
    assert relative_error(logits, case.logits[:num_tokens]) < TOLERANCE
