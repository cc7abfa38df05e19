"""GPUs that divide requests in attention, against one rank and transformers on the CPU, in
float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.draft_networks import hybrid
from support.image_cases import GEMMA_4, GLMS, QWEN, QWEN_3_VL
from support.image_cases import check as check_images
from support.parity import batch, case_of, greedy, load_engine
from support.pipelines import mixed_outcomes
from support.tensor_parallel import check_with_aborts, short_case_of

from minisgl.engine import AsyncEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "cuda_graph_max_bs": 8,
    "tp": 2,
    "dp_attention": True,
}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "moe-60", "gpt-oss"])
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    check_with_aborts(short_case_of(name), **ON_GPU)


def test_tokens_of_an_adopted_model_equal_those_of_transformers() -> None:
    check_with_aborts(short_case_of("qwen3"), model_impl="adopted", **ON_GPU)


@pytest.mark.parametrize("architecture", [QWEN, QWEN_3_VL, GLMS[0], GEMMA_4])
def test_tokens_behind_images_equal_those_of_transformers(architecture: str) -> None:
    check_images(architecture, **ON_GPU)


@pytest.mark.parametrize("disable_pynccl", [False, True])
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
def test_mixed_rows_get_the_outputs_of_the_cpu(
    cuda_graph_max_bs: int, disable_pynccl: bool
) -> None:
    case = case_of("llama-biased")
    options = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "disable_pynccl": disable_pynccl}
    assert mixed_outcomes(case, **options) == mixed_outcomes(case)


@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
@pytest.mark.parametrize("name", ["qwen3", "moe-60"])
def test_n_grams_change_no_token(name: str, cuda_graph_max_bs: int) -> None:
    options = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "speculative": "ngram"}
    check_with_aborts(short_case_of(name), **options)


@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
@pytest.mark.parametrize("drafts_itself", [False, True])
def test_mixed_rows_are_sampled_beside_runs(drafts_itself: bool, cuda_graph_max_bs: int) -> None:
    """With n-grams, and with the model as its own drafter."""
    case = case_of("llama-biased")
    speculative = str(case.folder) if drafts_itself else "ngram"
    options = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "speculative": speculative}
    assert mixed_outcomes(case, **options) == mixed_outcomes(case)


def tokens_of(folder: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens of prompts that are asked together, and then once more, each alone."""
    lengths = range(5, 60, 9)
    prompts = [[(length + index**2) % 499 for index in range(length)] for length in lengths]

    async def run() -> list[list[int]]:
        async with AsyncEngine(load_engine(folder, **options)) as engine:
            outputs = await batch(engine, prompts, [greedy(24)] * len(prompts))
            for prompt in prompts:
                outputs += await batch(engine, [prompt], [greedy(24)])
            return [output.token_ids for output in outputs]

    return asyncio.run(run())


@pytest.mark.parametrize("speculative", [None, "ngram", "mtp"])
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 8])
def test_states_advance_by_what_counts(speculative: str | None, cuda_graph_max_bs: int) -> None:
    _, folder = hybrid("Qwen3_5ForCausalLM")
    options = ON_GPU | {"cuda_graph_max_bs": cuda_graph_max_bs, "speculative": speculative}
    expected = tokens_of(folder, device="cuda", dtype="float32", cuda_graph_max_bs=0)
    assert tokens_of(folder, **options) == expected
