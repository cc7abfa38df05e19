"""Greedy runs of small models with a state, on prompts that share a beginning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from support.checkpoints import GreedyRun, greedy_reference
from support.drafters import KnowingDrafter
from transformers import PreTrainedModel

NUM_TOKENS = 24
LENGTHS = (3, 17, 70, 70, 9)
NUM_SHARED = 40  # tokens, of the longer prompts
# Of Qwen3-Next and Qwen3.5, and of their mixtures.
HYBRID = {
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "max_position_embeddings": 512,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


@dataclass(frozen=True)
class StateCase:
    folder: Path
    prompts: list[list[int]]
    runs: list[GreedyRun]


def drafter_of(case: StateCase) -> KnowingDrafter:
    """Drafts what the requests of the case are known to get, and at times something else."""
    runs = zip(case.prompts, case.runs, strict=True)
    return KnowingDrafter("fading", [prompt + run.token_ids for prompt, run in runs], 257)


def save_case(model: PreTrainedModel, folder: Path) -> StateCase:
    """Save a model, whose vocabulary has 257 tokens, and run it on prompts of LENGTHS."""
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(2, 257, (NUM_SHARED,), generator=generator).tolist()
    prompts = []
    for length in LENGTHS:
        own = torch.randint(2, 257, (length,), generator=generator).tolist()
        prompts.append((shared + own)[:length] if length > NUM_SHARED else own)
    runs = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert all(len({*run.token_ids}) > 5 for run in runs)
    return StateCase(folder, prompts, runs)
