"""Small models for every kind of cache that the table of scripts/tools/pairs.py has, and what
transformers answers to prompts that share a beginning."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pairs import KINDS
from support.checkpoints import Spec, greedy_reference, load_reference, make_checkpoint, spec_named
from support.draft_networks import hybrid, latent
from support.parity import Case
from transformers import PreTrainedModel

FULL, LATENTS, WINDOWED, WINDOWED_ALONE, STATES = KINDS
NATIVE = {FULL: "llama3", LATENTS: "glm-flash", WINDOWED: "gpt-oss", WINDOWED_ALONE: "mistral"}
QWEN3_5 = Spec("qwen3.5", "Qwen3_5ForCausalLM", hidden_size=64)
_FOLDER = TemporaryDirectory()
NUM_TOKENS = 10
LENGTHS = (31, 47, 52)
NUM_SHARED = 24  # tokens, of all prompts
# So few pages that prompts push others out, and so few requests that windowed layers need fewer.
FEW: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 30,
    "max_prefill_length": 16,
    "max_running_requests": 2,
    "max_seq_len_override": 100,
}
STATE_CACHE = {"state_cache": 0.02}  # of models with states, for many snapshots


def path(*names: str) -> Path:
    return Path(_FOLDER.name, *names)


def reference_of(kind: str) -> tuple[Spec, Path, PreTrainedModel]:
    if kind == STATES:
        mtp, folder = hybrid(QWEN3_5.architecture)
        return QWEN3_5, folder, mtp._target[0]
    if kind == LATENTS:
        mtp, folder = latent("glm-flash")
        return spec_named("glm-flash"), folder, mtp._target[0]
    spec = spec_named(NATIVE[kind])
    folder = make_checkpoint(spec, path(spec.name))
    return spec, folder, load_reference(folder)


@cache
def case_of(kind: str) -> Case:
    """Prompts that share a beginning, for a model that caches so."""
    spec, folder, model = reference_of(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for length in (NUM_SHARED, *LENGTHS):
        own = torch.randint(spec.vocab_size, (length,), generator=generator).tolist()
        prompts.append((prompts[0] + own)[:length] if prompts else own)
    del prompts[0]
    runs = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert all(len({*run.token_ids}) > 4 for run in runs), "a checkpoint without teeth"
    return Case(spec, folder, prompts, runs)
