"""Adopted models on a GPU against transformers on the CPU, in float32, captured and eager."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adopted_cases import case_of, check

pytestmark = pytest.mark.gpu

# Norms with 1 + w, windows, soft caps, experts, interleaved rotation, norms of whole rows,
# values of another width, packed maps, positions from a table, experts with biases, sinks.
ARCHITECTURES = (
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"),
    *("Cohere2ForCausalLM", "Olmo3ForCausalLM", "MiMoV2FlashForCausalLM"),
    *("Phi3ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
    "GptOssForCausalLM",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    case = case_of(architecture, tmp_path)
    on_gpu = {"device": "cuda", "dtype": "float32", "page_size": 16}
    check(case, alone=False, cuda_graph_max_bs=5, **on_gpu)
    check(case, alone=False, cuda_graph_max_bs=0, max_prefill_length=7, **on_gpu)
