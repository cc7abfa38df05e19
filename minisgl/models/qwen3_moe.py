"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in place of most MLPs."""

from __future__ import annotations

from minisgl.layers.experts import ExpertsConfig
from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import (
    DECODER_FIELDS,
    read_decoder,
    sparse_layers,
    switched_windows,
)

ARCHITECTURE = "Qwen3MoeForCausalLM"

# transformers does not read use_qk_norm, which the configs of Qwen3-Coder set.
_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers output_router_logits router_aux_loss_coef use_qk_norm"""
)


def read_config(fields: Fields) -> NativeConfig:
    """Unlike in Qwen3, head_dim has no default of its own, and a sliding window that is switched on
    applies to every layer."""
    fields.refuse_others(_FIELDS)
    return read_decoder(
        fields,
        ARCHITECTURE,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        windows=switched_windows(fields, 4096),
        experts=_read_experts(fields),
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    # transformers 4 and 5 name the number differently.
    name = "num_local_experts" if fields.values.get("num_local_experts") else "num_experts"
    return ExpertsConfig(
        num_experts=fields.count(name),
        num_chosen=fields.count("num_experts_per_tok"),
        size=fields.count("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
        layers=sparse_layers(fields),
    )
