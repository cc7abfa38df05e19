"""What trainers ask for, on a GPU: processed logprobs, a float32 head, routed experts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.parity import load_engine
from support.routed_experts import check, folder_of, prompts_of, run
from support.sampling_cases import ANY_FULL, FULL, MIXED, Batch, random_logits

from minisgl.engine import AsyncEngine
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.float32_product import Float32Product
from minisgl.runner.sampling_features import Scoring

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_128_alternatives_equal_the_reference(processed: bool, dtype: torch.dtype) -> None:
    params = [replace(each, logprobs=128) for each in (*MIXED, *FULL)]
    num = len(params)
    for scale in (0.3, 3.0):
        logits = random_logits(num, 151_936, scale=scale, dtype=dtype, device="cuda")
        batch = Batch.of(params, num, logits, scoring=Scoring(128, processed))
        batch.sampler.tables.allocate_history()
        assert batch.check_full(lambda batch=batch: batch.sample(ANY_FULL)) <= 1


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_float32_product_is_rounded_in_its_sums_alone(rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(50_257, 2048, generator=generator, device="cuda").bfloat16()
    x = torch.randn(rows, 2048, generator=generator, device="cuda").bfloat16()
    y, exact = Float32Product(DenseProduct(weight))(x), x.double() @ weight.double().t()
    assert y.dtype == torch.float32
    assert (y - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("name", ["moe", "moe-60"])
@pytest.mark.parametrize("graphs", [0, 8])
def test_experts_are_those_of_transformers_for_each_token(name: str, graphs: int) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": graphs}

    async def main() -> None:
        loaded = load_engine(folder_of(name), return_routed_experts=True, **options)
        async with AsyncEngine(loaded) as engine:
            for _ in range(2):
                for request in await run(engine, prompts_of(name)):
                    check(name, request)

    asyncio.run(main())
