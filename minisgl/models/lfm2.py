"""LFM2 (arXiv 2511.23404): a gated short convolution in most layers, attention in the others, each
before an MLP. LFM2-MoE has a mixture of experts in place of most MLPs, chosen as in DeepSeek-V3. Of
LFM2-VL, the text part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from minisgl.config import AttentionSpec, StateSpec
from minisgl.distributed.communicator import Communicator
from minisgl.errors import UnsupportedModelError
from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.layers.experts import ExpertsConfig
from minisgl.layers.formats import WeightFormat
from minisgl.layers.short_conv import ShortConv, state_of
from minisgl.models.config import NativeConfig
from minisgl.models.config_reader import CONFIG_FILE, Fields, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder
from minisgl.models.text_part import text_part
from minisgl.models.transformer import CausalLM, DecoderLayer

WITH_TOWER = "Lfm2VlForConditionalGeneration"
_TOWERS = ("vision_tower.", "multi_modal_projector.")
# Of the whole, about images.
_OF_IMAGES = field_names(
    """downsample_factor projector_bias projector_hidden_act projector_hidden_size
    projector_use_layernorm vision_feature_layer do_image_splitting encoder_patch_size
    max_image_tokens min_image_tokens max_num_patches max_pixels_tolerance max_tiles min_tiles
    tile_size use_image_special_tokens use_thumbnail"""
)
_CONV_FIELDS = DECODER_FIELDS | field_names("norm_eps conv_bias conv_L_cache tie_embedding")
_FIELDS = _CONV_FIELDS | field_names(
    """block_multiple_of block_ffn_dim_multiplier
    block_auto_adjust_ff_dim block_ff_dim full_attn_idxs block_dim
    block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc"""
)
_MOE_FIELDS = _CONV_FIELDS | field_names(
    """num_dense_layers num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    use_expert_bias routed_scaling_factor output_router_logits"""
)
# What checkpoints call the parts of a layer that others here have, too.
_NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    ".w1": ".gate_proj",
    ".w3": ".up_proj",
    ".w2": ".down_proj",
    "expert_bias": "e_score_correction_bias",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig(NativeConfig):
    """A decoder with a short convolution in some layers."""

    conv_width: int
    conv_layers: frozenset[int]

    def layer(self, layer: int) -> AttentionSpec | StateSpec:
        """The state of a convolution, or what attention computes."""
        if layer in self.conv_layers:
            return state_of(self.hidden_size, self.conv_width, self.dtype)
        return self.attention(layer)

    def state_maps(self) -> list[tuple[int, int]]:
        """Rows and columns of the map into a convolution and of the one out of it."""
        return [(3 * self.hidden_size, self.hidden_size), (self.hidden_size, self.hidden_size)]


def read_config(fields: Fields, architecture: str) -> ConvConfig:
    """Raises as `read_decoder` does."""
    fields.refuse_others(_FIELDS)
    return _read(fields, architecture, _inner_size(fields))


def read_moe_config(fields: Fields, architecture: str) -> ConvConfig:
    """Raises as `read_decoder` does."""
    fields.refuse_others(_MOE_FIELDS)
    if fields.values.get("layer_types") is None:
        raise fields.wrong("layer_types", "a list of conv and full_attention")
    return _read(
        fields, architecture, fields.count("intermediate_size", 7168), _read_experts(fields)
    )


def read_vl_config(whole: Fields, architecture: str) -> ConvConfig:
    """Raises as `read_decoder` does."""
    given = {name: value for name, value in whole.values.items() if name not in _OF_IMAGES}
    tied = given.pop("tie_embedding", given.pop("tie_word_embeddings", True))  # which decides
    fields, notes = text_part(Fields(given, whole.where))
    fields = Fields({**fields.values, "tie_word_embeddings": tied}, fields.where)
    is_mixture = fields.values.get("model_type") == "lfm2_moe"
    read = (read_moe_config if is_mixture else read_config)(fields, architecture)
    return replace(read, notes=(*read.notes, *notes))


def _read(
    fields: Fields, architecture: str, inner_size: int, experts: ExpertsConfig | None = None
) -> ConvConfig:
    """inner_size: of an MLP."""
    fields.require("conv_bias", (None, False))
    width = fields.count("conv_L_cache", 3)
    if not 2 <= width <= 4:
        raise UnsupportedModelError(f"{CONFIG_FILE}: conv_L_cache {width}; allowed: 2 to 4")
    plain = {
        **fields.values,
        "layer_types": None,
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "intermediate_size": inner_size,
        "tie_word_embeddings": fields.flag(
            "tie_word_embeddings", fields.flag("tie_embedding", True)
        ),
        # That of rope_parameters comes before it.
        "rope_theta": fields.number_above(1, "rope_theta", 1_000_000.0),
    }
    read = read_decoder(Fields(plain, fields.where), architecture, qk_norm=True, experts=experts)
    conv_layers = _conv_layers(fields, read.num_layers)
    return read.extended(ConvConfig, conv_width=width, conv_layers=conv_layers)


def _inner_size(fields: Fields) -> int:
    """The inner size of the MLPs, which a checkpoint may give before it was adjusted."""
    size = fields.count("block_ff_dim", fields.count("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.count("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


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


def _conv_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        attend = [*range(num_layers)]
        if fields.values.get("full_attn_idxs") is not None:
            attend = fields.whole_numbers("full_attn_idxs")
        kinds = ["full_attention" if layer in attend else "conv" for layer in range(num_layers)]
    if not isinstance(kinds, list) or not {*map(str, kinds)} <= {"conv", "full_attention"}:
        raise fields.wrong("layer_types", "a list of conv and full_attention")
    if len(kinds) != num_layers or "full_attention" not in kinds:
        raise fields.wrong("layer_types", f"of {num_layers} layers, one of which attends at least")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv")


def name_of(stored_name: str) -> str | None:
    """What a tensor of a checkpoint is called in the model; None for those of the tower."""
    name = stored_name.removeprefix("model.")
    if name.startswith(_TOWERS):
        return None
    name = name.removeprefix("language_model.")
    for stored, ours in _NAMES.items():
        name = name.replace(stored, ours)
    return name


class ConvLayer(DecoderLayer):
    """A layer with a short convolution or attention, and an MLP."""

    def mixer_name(self, config: NativeConfig, index: int) -> str:
        assert isinstance(config, ConvConfig)
        return "conv" if index in config.conv_layers else "self_attn"

    def make_mixer(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        assert isinstance(config, ConvConfig)
        if index not in config.conv_layers:
            return super().make_mixer(config, index, format, comm)
        return ShortConv(config.hidden_size, index, config.conv_width, format, comm)


class Lfm2ForCausalLM(CausalLM):
    layer_type = ConvLayer
