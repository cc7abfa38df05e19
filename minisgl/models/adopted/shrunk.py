"""Small copies of a model's config, with all that decides how the model computes."""

from __future__ import annotations

import copy
from typing import Any

HEAD_DIM = 16
WINDOW = 5
VOCAB_SIZE = 97
MAX_LAYERS = 8
_NUM_EXPERTS = 8

# Sizes that mean the same in every config which has them. Those that are smaller already stay.
_SIZES = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 24,
    "ffn_dim": 48,
    "n_inner": 48,
    "sliding_window": WINDOW,
    "num_experts": _NUM_EXPERTS,
    "num_local_experts": _NUM_EXPERTS,
    "n_routed_experts": _NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "attention_chunk_size": WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 64,
}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SOFT_CAP = 2.0  # that most numbers come near to
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def shrunk(config: Any, num_layers: int) -> Any:
    """A copy of a transformers config with small sizes and the first `num_layers` layers.

    Ratios that matter stay: several query heads of a KV head, keys and values of different widths,
    heads that are together wider than the hidden size, the share of a head that is rotated.
    """
    small = copy.deepcopy(config)
    layers = _take_layers(small)
    for name, size in _SIZES.items():
        if isinstance(value := getattr(small, name, None), int) and value > size:
            setattr(small, name, size)
    for name in _SOFT_CAPS:
        if getattr(small, name, None) is not None:
            setattr(small, name, _SOFT_CAP)
    _shrink_heads(small)
    kept = _kept_layers(small, num_layers)
    _cut_layers(small, kept)
    if layers:
        small.per_layer_config = {
            place: _shrunk_layer(layers[layer], config)
            for place, layer in enumerate(kept)
            if layer in layers
        }
    small.vocab_size = min(small.vocab_size, VOCAB_SIZE)
    for name in _IDS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 1)
    return small


def _take_layers(config: Any) -> dict[int, dict[str, Any]]:
    """Take out of a config what differs from layer to layer."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    layers: dict[int, dict[str, Any]] = config._heterogeneity_spec.per_layer_overrides
    config.per_layer_config = None
    return layers


def _shrunk_layer(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """values: what is different in a layer of `config`."""
    shrunk = dict(values)
    if "head_dim" in values:
        is_wider = values["head_dim"] > config._getattr_without_heterogeneous_validation("head_dim")
        shrunk["head_dim"] = HEAD_DIM * 2 if is_wider else HEAD_DIM
    if "num_key_value_heads" in values:
        shrunk["num_key_value_heads"] = min(values["num_key_value_heads"], 1)
    return shrunk


def _shrink_heads(config: Any) -> None:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shared = heads // kv_heads
    new_kv = min(kv_heads, 2)
    new_heads = new_kv * min(shared, 2)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    fills = heads * head_dim == hidden
    config.num_attention_heads = new_heads
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = new_kv
    config.hidden_size = new_heads * HEAD_DIM if fills else new_heads * HEAD_DIM // 2 * 3
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = HEAD_DIM
    if (global_dim := getattr(config, "global_head_dim", None)) is not None:
        config.global_head_dim = HEAD_DIM * 2 if global_dim > head_dim else HEAD_DIM
    if (global_heads := getattr(config, "num_global_key_value_heads", None)) is not None:
        config.num_global_key_value_heads = min(global_heads, new_kv)
    if (value_dim := getattr(config, "v_head_dim", None)) is not None:
        config.v_head_dim = HEAD_DIM if value_dim == head_dim else HEAD_DIM // 2
    if rotary_dim := getattr(config, "rotary_dim", None):
        config.rotary_dim = rotary_dim * HEAD_DIM // head_dim
    for name in ("swa_num_attention_heads", "swa_num_key_value_heads"):
        if getattr(config, name, None) is not None:
            setattr(config, name, new_heads if name.endswith("attention_heads") else new_kv)
    for name in ("swa_head_dim", "swa_v_head_dim"):
        if (width := getattr(config, name, None)) is not None:
            setattr(config, name, HEAD_DIM if width == head_dim else HEAD_DIM // 2)
    _shrink_rope(config, head_dim)


def _shrink_rope(config: Any, head_dim: int) -> None:
    """Factors of longrope are one for each rotated pair."""
    ropes = [getattr(config, "rope_parameters", None) or {}]
    ropes += [rope for rope in ropes[0].values() if isinstance(rope, dict)]
    for rope in ropes:
        for name in ("short_factor", "long_factor"):
            if isinstance(factors := rope.get(name), list):
                rope[name] = factors[: len(factors) * HEAD_DIM // head_dim]


def _kept_layers(config: Any, num_layers: int) -> list[int]:
    """The first layers; where layers at the end read the keys of others, the first of each type of
    these and of the others."""
    num_shared = getattr(config, "num_kv_shared_layers", None)
    if not isinstance(num_shared, int) or not num_shared:
        return list(range(num_layers))
    first_shared = config.num_hidden_layers - num_shared
    types = config.layer_types[:first_shared]
    own = [types.index(kind) for kind in dict.fromkeys(types)]
    return own + [config.layer_types.index(types[layer], first_shared) for layer in own]


def _cut_layers(config: Any, kept: list[int]) -> None:
    """Cut the number of layers, and every list with an entry for each."""
    before = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, [value[layer] for layer in kept])
    if getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = len(kept) // 2
    config.num_hidden_layers = len(kept)
