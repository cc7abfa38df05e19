"""Small checkpoints of architectures that run with transformers' code."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from minisgl.models.adopted.discover import Discovered, discover, num_layers_of_each_kind
from minisgl.models.adopted.proof import give_teeth
from minisgl.models.adopted.reader import model_class
from minisgl.models.adopted.shrunk import MAX_LAYERS, shrunk
from minisgl.models.adopted.towers import text_part

# What published checkpoints set, where the defaults of the class make no model.
SET = {
    "dots1": {
        "n_routed_experts": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
    },
    "emu3": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91, "<|visual token 000000|>": 92}},
    "gemma4_text": {"num_kv_shared_layers": 10},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2047},
}
# The text part where a kind of model has one of its own.
_KINDS = {
    architecture: kind
    for kind, architecture in sorted(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda item: item[0].endswith("_text")
    )
    if isinstance(architecture, str)
} | {"Emu3ForCausalLM": "emu3_text_model"}
_KINDS_WITH_TOWERS = {
    architecture: kind
    for kind, architecture in reversed(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
    if isinstance(architecture, str)
}
# Sizes of towers, which do not run.
_TOWER_SIZES = {
    "hidden_size": 32,
    "embed_dim": 32,
    "projection_dim": 32,
    "intermediate_size": 48,
    "mlp_dim": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "base_channels": 32,
    "num_res_blocks": 1,
}


def full_config(architecture: str) -> Any:
    """A config of published sizes."""
    kind = _KINDS[architecture]
    return CONFIG_MAPPING[kind](**SET.get(kind, {}))


@cache
def found_in(architecture: str) -> Discovered:
    """What is discovered in a model of published sizes, which takes a moment."""
    return discover(model_class(architecture), full_config(architecture))


def small_config(architecture: str) -> Any:
    """A config with every kind of layer, and windows shorter than most prompts."""
    kinds = num_layers_of_each_kind(found_in(architecture), MAX_LAYERS)
    small = shrunk(full_config(architecture), kinds)
    small.architectures = [architecture]
    return small


def write_checkpoint(architecture: str, folder: Path) -> Path:
    """config.json and safetensors with random weights under which mistakes show."""
    config = small_config(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(architecture)._from_config(config, dtype=torch.float32)
        give_teeth(model)
    model.save_pretrained(folder)
    return folder


def write_checkpoint_with_towers(
    architecture: str, folder: Path, placeholder: int | None = None
) -> Path:
    """The same of a model with towers. placeholder: the id of images, in place of a large one."""
    kind = _KINDS_WITH_TOWERS[architecture]
    config = CONFIG_MAPPING[kind](**SET.get(kind, {}))
    text, of_text = text_part(config)
    if text.model_type == config.text_config.model_type:
        config.text_config = small_config(of_text)
    else:  # it is another model for text
        config.text_config = part = shrunk(config.text_config, 3)
        width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        pairs = int(width * part.rope_parameters.get("partial_rotary_factor", 1)) // 2
        part.rope_parameters["mrope_section"] = [pairs - 4, 2, 2]
    for part in config.sub_configs.keys() - {"text_config"}:
        tower = getattr(config, part)
        for name, size in _TOWER_SIZES.items():
            if isinstance(getattr(tower, name, None), int):
                setattr(tower, name, size)
    if placeholder is not None:
        config.image_token_id = placeholder
        config.vision_config.image_size = 56
        if hasattr(config, "mm_tokens_per_image"):
            config.mm_tokens_per_image = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, architecture)._from_config(config, dtype=torch.float32)
        give_teeth(model)
    model.save_pretrained(folder)
    return folder
