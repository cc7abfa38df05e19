"""gpt-oss (arXiv 2508.10925): experts in every layer, with biases and a clamped activation, and
attention with sinks, in every other layer within a window."""

from __future__ import annotations

from minisgl.kernels.moe.reference import Clamped
from minisgl.layers.experts import ExpertsConfig
from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import (
    DECODER_FIELDS,
    read_decoder,
    windows_of_all,
    windows_of_kinds,
)

# transformers does not read experts_per_token and initial_context_length, which repeat others.
_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias num_local_experts num_experts_per_tok experts_per_token
    initial_context_length swiglu_limit swiglu_alpha output_router_logits router_aux_loss_coef"""
)
# That of transformers, where the config says nothing.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(fields: Fields, architecture: str) -> NativeConfig:
    """The intermediate size is that of an expert."""
    fields.refuse_others(_FIELDS)
    if not (fields.values.get("rope_scaling") or fields.values.get("rope_parameters")):
        rope = _ROPE | {"rope_theta": fields.number("rope_theta", 150_000.0)}
        fields = Fields({**fields.values, "rope_parameters": rope}, fields.where)
    return read_decoder(
        fields,
        architecture,
        head_dim=64,
        qkv_bias=fields.flag("attention_bias", True),
        windows=windows_of_kinds(fields, windows_of_all(fields, 128), lambda layer: layer % 2 == 0),
        experts=_read_experts(fields),
        sinks=True,
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=fields.count("num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok", 4),
        size=fields.count("intermediate_size"),
        normalize=True,  # the softmax is that of the chosen logits
        layers=frozenset(range(fields.count("num_hidden_layers"))),
        clamped=Clamped(
            limit=fields.number_above(0, "swiglu_limit", 7.0),
            alpha=fields.number("swiglu_alpha", 1.702),
        ),
        router="router",
        bias=True,
        interleaved=True,
    )
