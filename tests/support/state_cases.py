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
