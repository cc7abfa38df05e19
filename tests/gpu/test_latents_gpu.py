"""Attention over latents on a GPU: its kernels at the sizes of GLM-4.7-Flash and DeepSeek-V3, and
the tokens of small models."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.attention_cases import Shape, check_decode, check_prefill, in_float32, paged_cache
from support.checkpoints import LATENT_SPECS
from support.draft_networks import latent
from support.grouped_cases import ROUTINGS, check_experts_of, check_grouped
from support.latent_cases import (
    LATENTS,
    Latents,
    check_store_latents,
    check_values_of_latents,
)
from support.parity import FEW_PAGES, batch, case_of, check, greedy, load_engine

from minisgl.attention.base import DecodeBatch
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton_attention import TritonAttention
from minisgl.config import KVScales
from minisgl.engine import AsyncEngine
from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.request import RequestOutput

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
FP8 = KVScales(k=0.02, v=0.02)
FLASH = Shape(
    20, 576, 16, 1, dtype=torch.bfloat16, device="cuda", value_dim=512, v_in_k=True
)  # GLM-4.7-Flash
SHAPES = [
    FLASH,
    replace(FLASH, page_size=64),
    replace(FLASH, page_size=1, dtype=torch.float16),
    replace(FLASH, kv_scales=FP8),
    replace(FLASH, group=16),  # DeepSeek-V2-Lite, or V3 on 8 ranks
    replace(FLASH, group=128),  # DeepSeek-V3
    replace(FLASH, group=5, kv_scales=FP8),  # GLM-4.7-Flash on 4 ranks
    replace(FLASH, group=3, head_dim=80, value_dim=64, dtype=torch.float32),
]
ALL_LATENTS = [*LATENTS, Latents(128, 128, 64, 512, 128)]  # and those of DeepSeek-V3
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_matches_the_reference(shape: Shape) -> None:
    check_decode(TritonAttention(), shape, [1, 2, 127, 128, 129, 255, 1000, 5000])
    check_decode(TritonAttention(), shape, [9000], seed=1)
    draw = random.Random(0)
    check_decode(TritonAttention(), shape, [draw.randint(1, 3000) for _ in range(64)], seed=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_matches_the_reference(shape: Shape) -> None:
    check_prefill(TritonAttention(), shape, [(0, 1), (0, 300), (100, 66), (1000, 129), (5000, 1)])
    check_prefill(TritonAttention(), shape, [(9000, 20)], seed=1)


def test_a_captured_decode_serves_any_lengths() -> None:
    """Rows that are split, rows that are not, and rows of nothing."""
    backend, kv_lengths = TritonAttention(), [4000, 3000, 3500, 200]
    kv, table = paged_cache(FLASH, kv_lengths, starts=[0] * 4)
    lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=GPU)
    rows, q = DecodeBatch(table, lengths, max(kv_lengths)), FLASH.queries(4)
    backend.decode(FLASH.call(q, kv), rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode(FLASH.call(q, kv), rows)
    for changed in ([4000, 3000, 3500, 200], [1, 64, 0, 200], [3999, 1, 1, 1]):
        lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        expected = TorchAttention().decode(FLASH.call(*in_float32(q, kv)), rows)
        live = lengths > 0
        difference = (out[live].float() - expected[live]).abs().max()
        assert difference <= 8e-3 * expected[live].abs().max().clamp(min=1)
        assert (out[~live] == 0).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32, 300])
@pytest.mark.parametrize("latents", ALL_LATENTS, ids=str)
def test_latents_are_stored_as_the_reference_does(
    latents: Latents, num_rows: int, dtype: torch.dtype, fp8: bool
) -> None:
    check_store_latents(num_rows, latents, dtype, GPU, fp8=fp8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32, 300])
@pytest.mark.parametrize("latents", ALL_LATENTS, ids=str)
def test_values_are_those_of_the_reference(
    latents: Latents, num_rows: int, dtype: torch.dtype
) -> None:
    check_values_of_latents(num_rows, latents, dtype, GPU)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3000])
@pytest.mark.parametrize(("num_experts", "routing"), ROUTINGS, ids=str)
def test_experts_are_chosen_as_the_reference_does(
    num_experts: int, routing: GroupRouting, num_rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    check_grouped(num_rows, num_experts, routing, dtype, GPU, has_bias=has_bias)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize(("num_experts", "routing"), ROUTINGS, ids=str)
def test_few_rows_choose_as_many_do(
    num_experts: int, routing: GroupRouting, num_rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    check_experts_of(num_rows, num_experts, routing, dtype, GPU, has_bias=has_bias, pdl=True)


@pytest.mark.parametrize("name", [spec.name for spec in LATENT_SPECS])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefill_length": 7, "page_size": 4}, {"cuda_graph_max_bs": 0}, FEW_PAGES],
    ids=lambda options: ",".join(options) or "plain",
)
def test_greedy_tokens_equal_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    check(case_of(name), **{**ON_GPU, **options})


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("name", ["deepseek-v3", "glm-flash"])
def test_a_layer_that_drafts_changes_no_token(name: str, graphs: int) -> None:
    """Its latents are in the pages, too, and its steps are captured."""
    _, folder = latent(name)
    prompts = [list(range(7, 7 + length)) for length in (3, 40, 200, 64)]

    async def run(**drafting: Any) -> list[RequestOutput]:
        options = {**ON_GPU, "cuda_graph_max_bs": graphs, **drafting}
        async with AsyncEngine(load_engine(folder, **options)) as engine:
            return await batch(engine, prompts, [greedy(48)] * len(prompts))

    expected = asyncio.run(run())
    found = asyncio.run(run(speculative="mtp", draft_tokens=3))
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert all(each.num_drafted_tokens for each in found)
