"""Qwen3-Next and Qwen3.5 to 3.8: a gated delta net in most layers, attention in the others, each
before an MLP or a mixture of experts. Of models that also see images, the text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from minisgl.config import AttentionSpec, StateSpec
from minisgl.distributed.communicator import Communicator
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.layers.experts import ExpertsConfig
from minisgl.layers.formats import WeightFormat
from minisgl.layers.gated_delta import DeltaHeads, GatedDeltaNet
from minisgl.layers.linear import MergedMap
from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import CONFIG_FILE, Fields, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder, sparse_layers
from minisgl.models.text_part import text_part
from minisgl.models.transformer import CausalLM, DecoderLayer

NEXT = "Qwen3NextForCausalLM"
TEXT = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
WITH_TOWER = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")

_TOWER = "visual"
DRAFTER = "mtp"
_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias attn_output_gate full_attention_interval
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads mamba_ssm_dtype output_gate_type
    decoder_sparse_step mlp_only_layers moe_intermediate_size shared_expert_intermediate_size
    num_experts num_experts_per_tok norm_topk_prob output_router_logits router_aux_loss_coef
    mtp_num_hidden_layers mtp_use_dedicated_embeddings"""
)
# What Qwen3-Next's checkpoints merge for each key head, and those of the others one after another.
_INTERLEAVED = {
    "in_proj_qkvz": ("q", "k", "v", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_IN_TURN = (MergedMap("in_proj_qkv", ("q", "k", "v")),)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(NativeConfig):
    """A decoder with a gated delta net in some layers."""

    delta_heads: DeltaHeads
    delta_layers: frozenset[int]
    merged: tuple[MergedMap, ...]  # the maps of these layers that a checkpoint has together

    def layer(self, layer: int) -> AttentionSpec | StateSpec:
        """The state of a gated delta net, or what attention computes."""
        if layer in self.delta_layers:
            return self.delta_heads.state(self.dtype)
        return self.attention(layer)

    def state_maps(self) -> list[tuple[int, int]]:
        """Rows and columns of the maps to a delta net's heads, to its gates, and to the output."""
        heads, hidden = self.delta_heads, self.hidden_size
        keys, values = heads.num_keys, heads.num_values
        to_heads, to_gates = (keys + keys + values + values, hidden), heads.num_value_heads
        return [to_heads, (2 * to_gates, hidden), (hidden, values)]


def read_config(whole: Fields, architecture: str) -> HybridConfig:
    """Raises as `read_decoder` does."""
    fields, notes = text_part(whole)
    fields.refuse_others(_FIELDS)
    fields.require("attn_output_gate", (None, True))
    fields.require("mamba_ssm_dtype", (None, "float32"), ", in which states are kept")
    fields.require("output_gate_type", (None, "silu", "swish"))
    experts, num_layers = _read_experts(fields), fields.count("num_hidden_layers")
    read = read_decoder(
        Fields(_plain(fields.values, experts), fields.where),
        architecture,
        head_dim=256,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        experts=experts,
        rotary_share=0.25,
    )
    heads = DeltaHeads(
        num_key_heads=fields.count("linear_num_key_heads", 16),
        num_value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        conv_width=fields.count("linear_conv_kernel_dim", 4),
    )
    if heads.num_value_heads % heads.num_key_heads or not 2 <= heads.conv_width <= 4:
        raise CheckpointError(
            f"{CONFIG_FILE}: {heads.num_value_heads} value heads, {heads.num_key_heads} key heads "
            f"and a convolution of {heads.conv_width} do not fit: value heads must divide into key "
            "heads, and the convolution must have a width from 2 to 4."
        )
    merged: tuple[MergedMap, ...] = _IN_TURN
    if architecture == NEXT:
        merged = tuple(
            MergedMap(name, parts, heads.num_key_heads) for name, parts in _INTERLEAVED.items()
        )
    return read.extended(
        HybridConfig,
        notes=(*read.notes, *notes),
        norm_adds_one=True,
        has_gate=True,
        delta_heads=heads,
        delta_layers=frozenset(
            index for index, kind in enumerate(_kinds(fields, num_layers)) if kind.startswith("l")
        ),
        merged=merged,
    )


def name_of(stored_name: str) -> str | None:
    """What a tensor of a checkpoint is called in the model; None for what is left aside: the tower,
    and the layers that draft tokens."""
    name = stored_name.removeprefix("model.")
    if name.startswith((f"{_TOWER}.", f"{DRAFTER}.")):
        return None
    return name.removeprefix("language_model.")


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """linear_attention or full_attention of each layer."""
    linear, full = allowed = "linear_attention", "full_attention"
    interval = 1
    if fields.values.get("layer_types") is None:
        interval = fields.count("full_attention_interval", 4)
    default = [linear if (layer + 1) % interval else full for layer in range(num_layers)]
    kinds = fields.kinds("layer_types", allowed, default)
    if full not in kinds:
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: no layer has full_attention, which is not supported."
        )
    return kinds


def _plain(values: Mapping[str, Any], experts: ExpertsConfig | None) -> dict[str, Any]:
    """The fields for `read_decoder`, without those that are read here."""
    plain = {**values, "layer_types": None}
    if experts is not None and plain.get("intermediate_size") is None:
        plain["intermediate_size"] = experts.shared_size
    return plain


def _read_experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.values.get("num_experts"):
        return None
    return ExpertsConfig(
        num_experts=fields.count("num_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        size=fields.count("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", True),
        layers=sparse_layers(fields),
        shared_size=fields.count("shared_expert_intermediate_size", 512),
    )


class HybridLayer(DecoderLayer):
    """A layer with a gated delta net or attention, and an MLP or a mixture of experts."""

    def mixer_name(self, config: NativeConfig, index: int) -> str:
        assert isinstance(config, HybridConfig)
        return "linear_attn" if index in config.delta_layers else "self_attn"

    def make_mixer(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        assert isinstance(config, HybridConfig)
        if index not in config.delta_layers:
            return super().make_mixer(config, index, format, comm)
        return GatedDeltaNet(
            config.hidden_size,
            index,
            config.delta_heads,
            format,
            comm,
            norm_eps=config.norm_eps,
            merged=config.merged,
        )


class HybridForCausalLM(CausalLM):
    """Qwen3-Next, and Qwen3.5 to 3.8."""

    layer_type = HybridLayer
