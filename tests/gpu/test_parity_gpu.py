"""The engine on a GPU against transformers on the CPU, in float32 and in bfloat16."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.checkpoints import SPECS, load_reference, reference_logits
from support.parity import FEW_PAGES, SAMPLED, batch, case_of, check, load_engine

from minisgl.engine import AsyncEngine
from minisgl.parts.scores.host import scores_of
from minisgl.request import SamplingParams

pytestmark = pytest.mark.gpu

NAMES = [spec.name for spec in SPECS]
# Graphs for all batches that occur here, but for one prompt's worth: that one runs eagerly.
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graph_max_bs": 5}


@pytest.mark.parametrize("spec", NAMES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_prefill_length", [7, 8192])
def test_greedy_tokens_equal_those_of_transformers(
    spec: str, page_size: int, max_prefill_length: int
) -> None:
    check(case_of(spec), page_size=page_size, max_prefill_length=max_prefill_length, **ON_GPU)


@pytest.mark.parametrize("spec", NAMES)
def test_one_at_a_time_without_overlap_or_cache_gives_the_same_tokens(spec: str) -> None:
    check(case_of(spec), alone=True, overlap=False, cache_type="naive", **ON_GPU)


@pytest.mark.parametrize("spec", NAMES)
@pytest.mark.parametrize("attn", ["triton", "torch", "torch,triton", "triton,torch"])
def test_eager_mode_and_every_float32_backend_give_the_same_tokens(spec: str, attn: str) -> None:
    check(case_of(spec), **ON_GPU | {"attn": attn, "cuda_graph_max_bs": 0})


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_with_every_batch_size_captured_give_the_same_tokens(overlap: bool) -> None:
    check(case_of("qwen3"), overlap=overlap, **ON_GPU | {"cuda_graph_max_bs": 256})


@pytest.mark.parametrize("spec", NAMES)
def test_retraction_changes_no_token(spec: str) -> None:
    stats, _ = check(case_of(spec), **FEW_PAGES, **ON_GPU)
    assert stats.counters.num_retractions > 0


@pytest.mark.parametrize("cuda_graph_max_bs", [0, 4, 8])
def test_sampled_tokens_equal_those_of_the_cpu(cuda_graph_max_bs: int) -> None:
    case = case_of("llama3")
    on_gpu = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs}

    async def run(options: dict[str, Any]) -> list[list[int]]:
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            outputs = await batch(engine, case.prompts, SAMPLED)
            return [output.token_ids for output in outputs]

    assert asyncio.run(run(on_gpu)) == asyncio.run(run({}))


@pytest.mark.parametrize("spec", NAMES)
def test_bfloat16_logits_are_as_accurate_as_those_of_transformers(spec: str) -> None:
    """Scores of a prompt in bfloat16, against float32: the dtype explains the difference if
    transformers in bfloat16 is as far off."""
    case = case_of(spec)
    tokens = [*case.prompts[4], *case.runs[4].token_ids]
    reference = load_reference(case.folder)

    def scores(logits: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor(tokens[1:], device=logits.device)[:, None]
        return logits[:-1].float().log_softmax(-1).gather(1, chosen)[:, 0].cpu()

    exact = scores(reference_logits(reference, tokens))
    half = reference.to("cuda", torch.bfloat16)
    with torch.inference_mode():
        theirs = scores(half(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0])

    async def run() -> torch.Tensor:
        options = {**ON_GPU, "dtype": "bfloat16", "max_prefill_length": 50}
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            stream = engine.submit(tokens, params)
            async for _ in stream:
                pass
            return torch.tensor([entry.logprob for entry in scores_of(stream.request)])

    ours = asyncio.run(run())
    assert ours.shape == exact.shape
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean() + 0.02


def test_the_kv_cache_is_sized_from_memory() -> None:
    case = case_of("qwen3")
    free_bytes = torch.cuda.mem_get_info()[0]

    async def run() -> int:
        options = {**ON_GPU, "num_pages": None, "memory_ratio": 0.3}
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            await batch(engine, case.prompts, [SamplingParams(max_tokens=4)] * len(case.prompts))
            return free_bytes - torch.cuda.mem_get_info()[0]

    assert 0.25 < asyncio.run(run()) / free_bytes < 0.31
