"""LFM2-MoE: LFM2 with a mixture of experts in place of most MLPs, chosen as in DeepSeek-V3."""

from __future__ import annotations

from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.layers.experts import ExpertsConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.lfm2 import CONV_FIELDS, ConvConfig, read_with_convolutions

ARCHITECTURE = "Lfm2MoeForCausalLM"

_FIELDS = CONV_FIELDS | field_names(
    """num_dense_layers num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    use_expert_bias routed_scaling_factor output_router_logits"""
)


def read_config(fields: Fields) -> ConvConfig:
    """Raises as `read_decoder` does."""
    fields.refuse_others(_FIELDS)
    if fields.values.get("layer_types") is None:
        raise fields.wrong("layer_types", "a list of conv and full_attention")
    size = fields.count("intermediate_size", 7168)
    return read_with_convolutions(fields, ARCHITECTURE, size, _read_experts(fields))


def _read_experts(fields: Fields) -> ExpertsConfig:
    num_layers, num_dense = fields.count("num_hidden_layers"), fields.number("num_dense_layers", 2)
    routing = GroupRouting(
        top_k=fields.count("num_experts_per_tok", 4),
        normalize=fields.flag("norm_topk_prob", True),
        sigmoid=True,
        factor=fields.number("routed_scaling_factor", 1.0),
        least_sum=1e-6,
    )
    return ExpertsConfig(
        num_experts=fields.count("num_experts", 32),
        num_chosen=routing.top_k,
        size=fields.count("moe_intermediate_size", 1792),
        normalize=routing.normalize,
        layers=frozenset(layer for layer in range(num_layers) if layer >= num_dense),
        routing=routing,
        router_bias=fields.flag("use_expert_bias", True),
    )
