"""Small random checkpoints of Gemma 4 with teeth, and what transformers computes from them."""

from __future__ import annotations

import atexit
import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from support.checkpoints import (
    Case,
    GreedyRun,
    Spec,
    greedy_reference,
    random_prompt,
    reference_logits,
)
from support.parity import Case as Prompts
from support.parity import varied_run

WITH_TOWERS, WIDER = "experts, towers", "wider experts"
FOLDER = TemporaryDirectory()
atexit.register(FOLDER.cleanup)
VOCAB_SIZE = 257
LENGTHS = (3, 16, 17, 45, 64, 9)
# Layers of both kinds before and after each other; windows end within the prompts, and the last
# stage of two begins with a layer that has one.
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
KINDS.append("full_attention")
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": len(KINDS),
    "layer_types": KINDS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 20,
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "eos_token_id": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000.0,
        },
    },
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# With values of their own in every layer, more than one global KV head, and no soft cap.
PLAIN = {"attention_k_eq_v": False, "final_logit_softcapping": None}
WIDE = {"intermediate_size": 128, "moe_intermediate_size": 64}  # as INT4 needs them
CONFIGS = {"dense": TEXT, "experts": TEXT | EXPERTS, "plain": TEXT | PLAIN}
# Of weights whose greedy tokens fall into no short cycle.
SEEDS = {"dense": 3, "experts": 4, "plain": 3, WITH_TOWERS: 3, WIDER: 4}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@cache
def checkpoint_of(name: str) -> tuple[Path, Any]:
    """name: of CONFIGS, WITH_TOWERS or WIDER. Returns the folder, and the model of transformers."""
    folder = Path(FOLDER.name) / name
    if name == WITH_TOWERS:
        config: Any = transformers.Gemma4Config(
            text_config=CONFIGS["experts"], vision_config=TOWER, audio_config=None
        )
        architecture: Any = transformers.Gemma4ForConditionalGeneration
    else:
        config = transformers.Gemma4TextConfig(
            **({WIDER: CONFIGS["experts"] | WIDE} | CONFIGS)[name]
        )
        architecture = transformers.Gemma4ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[name])
        model = architecture._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        give_teeth(model)
    model.save_pretrained(folder)
    return folder, model


@torch.no_grad()
def give_teeth(model: torch.nn.Module) -> None:
    for name, number in model.named_buffers():
        if name.endswith("layer_scalar"):
            number.uniform_(0.5, 0.9)
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale")):
            # Attention has no scale, and one that is too peaked multiplies rounding errors.
            mean = 0.8 if ".self_attn." in name else 1.0
            weight.copy_(mean * (1 + 0.3 * torch.randn(weight.shape)))
        elif weight.dim() >= 2 and name.endswith(("weight", "proj")):
            gain = 2 if "embed_tokens" in name else 1
            weight.normal_(std=gain * weight.shape[-1] ** -0.5)


@cache
def case_of(name: str) -> Case:
    """A prompt with its 64 greedy tokens, and the logits of all."""
    folder, model = checkpoint_of(name)
    spec = Spec(name, type(model).__name__, vocab_size=VOCAB_SIZE)
    prompt = random_prompt(spec, 61)
    greedy = greedy_reference(model, prompt, 64)
    assert len({*greedy.token_ids}) >= 20, "a checkpoint without teeth"
    return Case(spec, folder, prompt, greedy, reference_logits(model, prompt + greedy.token_ids))


@cache
def prompts_of(name: str) -> Prompts:
    """Prompts with greedy tokens, some of which begin alike."""
    folder, model = checkpoint_of(name)
    spec = Spec(name, type(model).__name__, vocab_size=VOCAB_SIZE)
    shared = random_prompt(spec, 30, seed=2)
    prompts: list[list[int]] = []
    runs: list[GreedyRun] = []
    for seed in itertools.count(3):
        if len(prompts) == len(LENGTHS):
            break
        length = LENGTHS[len(prompts)]
        own = random_prompt(spec, length, seed=seed)
        prompt = (shared + own)[:length] if length > 30 else own
        if (run := varied_run(model, prompt)) is not None:
            prompts.append(prompt)
            runs.append(run)
    return Prompts(spec, folder, prompts, runs)
