"""The kernels for experts in FP8 and INT8 at awkward sizes: on a GPU if there is one, or else in
the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.fp8_expert_cases import Blocks, check, check_nan, random_experts

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.quantized_experts import Fp8Experts
from minisgl.kernels.moe.reference import ByRouter, Routing
from minisgl.kernels.tuning import H200

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKEN, GROUP, STATIC = Activations.TOKEN, Activations.GROUP, Activations.STATIC
# hidden_size and size, the blocks of gate_up and down, and how x is rounded
KINDS: dict[str, tuple[int, int, Blocks, Activations]] = {
    "channels": (72, 40, None, TOKEN),
    "channels, static": (64, 48, None, STATIC),
    "blocks": (160, 136, ((8, 128), (128, 128)), GROUP),  # both k end inside a block
    "blocks that ranks cut": (160, 192, ((64, 128), (128, 64)), GROUP),
    "narrow blocks": (128, 48, ((16, 128), (128, 16)), GROUP),
    "blocks of a row": (160, 96, ((1, 32), (1, 32)), GROUP),  # MXFP8
    "blocks, static": (128, 64, ((64, 128), (128, 64)), STATIC),
    "blocks, tokens": (160, 96, ((32, 128), (128, 32)), TOKEN),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_fused_experts_match_the_reference(num_rows: int, kind: str) -> None:
    dtype = torch.float32 if num_rows == 2 else torch.float16
    check(num_rows, 4, 2, *KINDS[kind], dtype=dtype, device=DEVICE, pdl=False)


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_experts_in_int8_match_the_reference(num_rows: int) -> None:
    dtype, how = torch.float32 if num_rows == 2 else torch.float16, KINDS["channels"]
    check(num_rows, 4, 2, *how, dtype=dtype, device=DEVICE, pdl=False, stored=torch.int8)


def test_experts_with_gelu_and_scales_match_the_reference() -> None:
    kind = KINDS["channels"]
    check(3, 4, 2, *kind, dtype=torch.float16, device=DEVICE, pdl=False, gelu=True)


@pytest.mark.parametrize("kind", ["channels", "blocks that ranks cut", "blocks, static"])
def test_a_nan_row_harms_no_other_row(kind: str) -> None:
    _, _, blocks, activations = KINDS[kind]
    check_nan(blocks, activations, device=DEVICE, pdl=False)


def test_a_nan_row_harms_no_other_row_of_int8() -> None:
    check_nan(None, TOKEN, device=DEVICE, pdl=False, stored=torch.int8)


def test_no_rows() -> None:
    experts = random_experts(4, 64, 32, None, TOKEN, DEVICE)
    x, logits = torch.randn(0, 64, device=DEVICE), torch.randn(0, 4, device=DEVICE)
    out, _ = fused_experts(x, ByRouter(logits, Routing(2, normalize=True)), experts, pdl=False)
    assert out.shape == (0, 64)


@pytest.mark.parametrize("shared_bytes", [99 << 10, H200.shared_bytes])
@pytest.mark.parametrize("size", [768, 384, 192])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_tiles_fit_into_shared_memory(in_blocks: bool, size: int, shared_bytes: int) -> None:
    """Of Qwen3-30B-A3B, on one, two or four ranks. A tile of k is a block."""
    width = min(size & -size, 128)
    blocks = ((width, 128), (128, width)) if in_blocks else (None, None)
    weights = [
        Fp8Weights(torch.empty(128, *shape, device="meta"), torch.empty(0), block)
        for shape, block in zip([(2 * size, 2048), (2048, size)], blocks, strict=True)
    ]
    experts = Fp8Experts(*weights, activations=GROUP if in_blocks else TOKEN)
    tuning, routing = replace(H200, shared_bytes=shared_bytes), Routing(8, normalize=True)
    kinds = set()
    for num_rows in (1, 2, 8, 32, 64, 128, 256, 384, 768, 1024, 6144, 8192, 16384):
        how = choose_tiles(num_rows, experts, routing.top_k, torch.bfloat16, tuning)
        products = [(how.inner, 2, 128), (how.outer, 1, width if in_blocks else 128)]
        for product, halves, block_k in products:
            tile = (product.block_n * halves + product.block_m) * block_k + 4 * product.block_m
            assert product.block_k == block_k
            assert product.num_stages >= 2 and tile * product.num_stages <= shared_bytes
        kinds.add(how)
    assert len(kinds) == 5
