"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; arXiv 2407.21783), and its next relatives, which
have the same modules: Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from minisgl.layers.experts import ExpertsConfig
from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import (
    DECODER_FIELDS,
    read_decoder,
    sparse_layers,
    switched_windows,
    switched_windows_of_some,
    windows_of_all,
)

# transformers does not read use_qk_norm, which the configs of Qwen3-Coder set.
_QWEN3_MOE_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers output_router_logits router_aux_loss_coef use_qk_norm"""
)


def read_llama(fields: Fields, architecture: str) -> NativeConfig:
    """attention_bias switches the biases of q, k, v and o on, mlp_bias those of the MLP.

    A sliding window has no effect, as in transformers.
    """
    fields.refuse_others(DECODER_FIELDS | field_names("attention_bias mlp_bias"))
    return read_decoder(
        fields,
        architecture,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def read_mistral(fields: Fields, architecture: str) -> NativeConfig:
    """Mistral 7B (Jiang et al., arXiv 2310.06825) has no biases. A config that does not mention the
    window has one of 4,096 tokens, as in transformers."""
    fields.refuse_others(DECODER_FIELDS)
    return read_decoder(fields, architecture, windows=windows_of_all(fields, 4096))


def read_qwen2(fields: Fields, architecture: str) -> NativeConfig:
    """In Qwen2 and Qwen2.5 (arXiv 2407.10671) the biases of q, k and v are always there; o has
    none."""
    fields.refuse_others(DECODER_FIELDS)
    windows = switched_windows_of_some(fields, 4096)
    return read_decoder(fields, architecture, qkv_bias=True, o_bias=False, windows=windows)


def read_qwen3(fields: Fields, architecture: str) -> NativeConfig:
    """Qwen3 (arXiv 2505.09388) has an RMS norm of every head of q and k. attention_bias switches
    the biases of q, k, v and o on. head_dim is 128 by default."""
    fields.refuse_others(DECODER_FIELDS | field_names("attention_bias"))
    return read_decoder(
        fields,
        architecture,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        windows=switched_windows_of_some(fields, 4096),
    )


def read_qwen3_moe(fields: Fields, architecture: str) -> NativeConfig:
    """Qwen3-MoE has a mixture of experts in place of most MLPs. Unlike in Qwen3, head_dim has no
    default of its own, and a sliding window that is switched on applies to every layer."""
    fields.refuse_others(_QWEN3_MOE_FIELDS)
    # transformers 4 and 5 name the number differently.
    name = "num_local_experts" if fields.values.get("num_local_experts") else "num_experts"
    experts = ExpertsConfig(
        num_experts=fields.count(name),
        num_chosen=fields.count("num_experts_per_tok"),
        size=fields.count("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
        layers=sparse_layers(fields),
    )
    return read_decoder(
        fields,
        architecture,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        windows=switched_windows(fields, 4096),
        experts=experts,
    )
