"""Random adapters of small checkpoints as PEFT saves them, and what PEFT computes with them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support import adopted_checkpoints, gemma_checkpoints
from support.checkpoints import load_reference, make_checkpoint, spec_named
from support.state_cases import EXPERTS as HYBRID_EXPERTS
from support.state_cases import HYBRID
from transformers import AutoModelForCausalLM, PreTrainedModel

from minisgl.models.adopted.proof import give_teeth

_FOLDER = TemporaryDirectory()
_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_CONVOLUTIONS = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "full_attention", "conv"],
    "intermediate_size": 128,
}
_WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextForCausalLM", HYBRID | HYBRID_EXPERTS),
    "qwen3.5": ("Qwen3_5ForCausalLM", HYBRID),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", HYBRID | HYBRID_EXPERTS),
    "qwen3.5-towers": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": HYBRID, "vision_config": _TOWER},
    ),
    "lfm2": ("Lfm2ForCausalLM", _CONVOLUTIONS),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        _CONVOLUTIONS
        | {
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
}

ALL = {"target_modules": "all-linear"}
STACKED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
_LATENT = {
    "target_modules": [
        *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
}
# The checkpoint, and the options of PEFT.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3", ALL),
    "llama-patterns": (
        "llama-biased",
        {
            "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
            "use_rslora": True,
            "alpha_pattern": {"q_proj": 3, r"layers\.1\..*\.up_proj": 9},
            "rank_pattern": {r"layers.1.*.down_proj": 2, "v_proj": 1},
        },
    ),
    "mistral-some-layers": (
        "mistral",
        {"target_modules": ["k_proj", "o_proj", "gate_proj"], "layers_to_transform": [1]},
    ),
    "qwen2-regex": ("qwen2", {"target_modules": r".*\.[01]\.(mlp\.up|self_attn\.k)_proj"}),
    "qwen3": ("qwen3", ALL),
    "moe-stacked": ("moe", ALL | STACKED),
    "moe-up": ("moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    "moe-down": ("moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "moe-router": ("moe", {"target_modules": ["v_proj"], "target_parameters": ["gate.weight"]}),
    # PEFT makes one pair of twice the rank of these.
    "moe-apart": (
        "moe",
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    ),
    "gpt-oss": ("gpt-oss", ALL | STACKED),
    "deepseek-v2": ("deepseek-v2", _LATENT | STACKED),
    "deepseek-v3": ("deepseek-v3", _LATENT | STACKED),
    "glm-flash": ("glm-flash", _LATENT | STACKED),
    "gemma4": ("gemma4", ALL | STACKED),
    "qwen3-next": ("qwen3-next", ALL | STACKED),
    "qwen3.5": ("qwen3.5", ALL),
    "qwen3.5-moe": ("qwen3.5-moe", ALL | STACKED),
    "qwen3.5-towers": (
        "qwen3.5-towers",
        {"target_modules": r".*language_model.*\.(q_proj|in_proj_qkv|in_proj_a|down_proj)"},
    ),
    "lfm2": ("lfm2", ALL),
    "lfm2-moe": ("lfm2-moe", ALL | STACKED),
    "phi3": ("Phi3ForCausalLM", ALL),
    "mixtral": ("MixtralForCausalLM", ALL | STACKED),
    "gpt-neox": ("GPTNeoXForCausalLM", ALL),
    "gemma2": ("Gemma2ForCausalLM", ALL),
    "qwen3-moe-adopted": ("Qwen3MoeForCausalLM", ALL | STACKED),
    "glm4-moe": ("Glm4MoeForCausalLM", ALL | STACKED),
}

# Those whose logits are compared with PEFT's; of the others, what is added to the weights.
COMPUTED = (
    *("llama", "llama-patterns", "qwen3", "moe-stacked", "moe-router", "moe-apart", "gpt-oss"),
    *("deepseek-v2", "deepseek-v3", "gemma4"),
    *("phi3", "gemma2", "mixtral", "qwen3-moe-adopted", "gpt-neox"),
)


@dataclass(frozen=True)
class Base:
    folder: Path
    architecture: Any  # of transformers
    is_adopted: bool = False


@cache
def base_of(name: str) -> Base:
    folder = Path(_FOLDER.name) / name
    if name == "gemma4":
        return Base(gemma_checkpoints.checkpoint_of("experts")[0], AutoModelForCausalLM)
    if name.endswith("LM"):
        adopted_checkpoints.write_checkpoint(name, folder)
        return Base(folder, AutoModelForCausalLM, is_adopted=True)
    if name not in _WITH_STATES:
        return Base(make_checkpoint(spec_named(name), folder), AutoModelForCausalLM)
    class_name, options = _WITH_STATES[name]
    architecture = getattr(transformers, class_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = architecture._from_config(architecture.config_class(**options))
        give_teeth(model)
    model.save_pretrained(folder)
    return Base(folder, architecture)


@dataclass(frozen=True)
class Trained:
    """An adapter in a folder."""

    base: Base
    folder: Path
    model: Any  # of PEFT

    def merged(self, folder: Path) -> Path:
        """A checkpoint with the adapter in its weights. `model` has them afterwards."""
        merged: PreTrainedModel = self.model.merge_and_unload()
        merged.save_pretrained(folder)
        return folder


def train(name: str, folder: Path, seed: int = 1) -> Trained:
    """Save a random adapter of ADAPTERS."""
    of_base, options = ADAPTERS[name]
    base = base_of(of_base)
    return train_on(base, load_reference(base.folder, base.architecture), options, folder, seed)


def train_on(
    base: Base, model: PreTrainedModel, options: dict[str, Any], folder: Path, seed: int = 1
) -> Trained:
    """Save a random adapter of a model, which gets it. options: of PEFT."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():  # PEFT asks transformers by a name that is deprecated
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, matrix in adapted.named_parameters():
                noise = torch.randn(matrix.shape, generator=generator)
                if ".lora_A." in name:
                    matrix.copy_(noise / matrix.shape[1] ** 0.5)
                elif ".lora_B." in name:
                    matrix.copy_(0.3 * noise)
        adapted.save_pretrained(folder)
    return Trained(base, folder, adapted.eval())
