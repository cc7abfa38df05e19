"""What trainers ask for, on a GPU: processed logprobs, a float32 head, routed experts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.parity import case_of, load_engine
from support.routed_experts import check, folder_of, prompts_of, run
from support.sampling_cases import ANY_FULL, FULL, MIXED, Batch, random_logits

from minisgl.engine import AsyncEngine
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.float32_product import Float32Product
from minisgl.request import SamplingParams
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


@pytest.mark.parametrize("graphs", [0, 8])
def test_named_tokens_have_the_logprobs_that_alternatives_have(graphs: int) -> None:
    """Those of alternatives are the kernel's, of the same step; with graphs, other requests go on
    in them once the last one that names tokens has ended."""
    case = case_of("llama3")
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "cuda_graph_max_bs": graphs}
    named = SamplingParams(
        seed=1, max_tokens=12, ignore_eos=True, logprobs=20, logprob_token_ids=range(20)
    )
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def main() -> None:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            requests = [engine.submit(prompt, named) for prompt in case.prompts]
            requests += [engine.submit(prompt, plain) for prompt in case.prompts]
            await asyncio.gather(*(stream.wait_finished() for stream in requests))
            compared = 0
            for stream in requests[: len(case.prompts)]:
                for entry in stream.request.logprobs:
                    others = {**dict(entry.top), entry.token_id: entry.logprob}
                    for token_id, logprob in entry.named:
                        if token_id in others:
                            compared += 1
                            assert logprob == pytest.approx(others[token_id], abs=1e-4)
            assert compared > 20

    asyncio.run(main())


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
