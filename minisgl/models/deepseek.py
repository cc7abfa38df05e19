"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and models built alike: Moonlight and
Kimi-K2 by the name of V3, the text part of Kimi-K2.5 to 2.7, and GLM-4.7-Flash."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from minisgl.config import AttentionSpec, ModelFacts
from minisgl.distributed.communicator import Communicator
from minisgl.errors import CheckpointError, UnsupportedModelError, one_of
from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.layers.experts import ExpertsConfig
from minisgl.layers.formats import WeightFormat
from minisgl.layers.latent_attention import LatentAttention, LatentSizes
from minisgl.models.config import NativeConfig, RopeConfig
from minisgl.models.config_reader import CONFIG_FILE, Fields, drafting_layers, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder
from minisgl.models.text_part import text_part
from minisgl.models.transformer import CausalLM, DecoderLayer

V2, V3, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
# As published, and as transformers writes it.
KIMI = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")

# Those of losses and of where experts are have no effect.
_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias mlp_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim
    qk_head_dim v_head_dim rope_interleave first_k_dense_replace moe_layer_freq mlp_layer_types
    n_routed_experts num_experts num_local_experts n_shared_experts num_experts_per_tok
    moe_intermediate_size n_group topk_group topk_method scoring_func norm_topk_prob
    routed_scaling_factor num_nextn_predict_layers num_mtp_layers
    aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits ep_size"""
)
_GREEDY, _IN_GROUPS, _BY_BIAS = "greedy", "group_limited_greedy", "noaux_tc"
_ROUTER_BIAS = "e_score_correction_bias"
_TOWER = ("vision_tower.", "mm_projector.")
# What a layer that drafts has beside the others, as the drafter calls it; None: it is the model's.
_OF_DRAFTER = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "embed_tokens": None,
    "shared_head.head": None,
}
# What transformers takes where a config says nothing.
_V3_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # of others: V3's
    V2: {
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    },
    GLM: _V3_DEFAULTS
    | {
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(NativeConfig):
    """A decoder that attends over latents, with experts in most layers."""

    sizes: LatentSizes
    scale: float  # of scores

    def attention(self, layer: int) -> AttentionSpec:
        """Attention over latents: one key for all heads, whose first numbers are the value."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.sizes.rank + self.sizes.rope_dim,
            scale=self.scale,
            value_dim=self.sizes.rank,
            v_in_k=True,
        )

    def rotation(self, layer: int) -> tuple[RopeConfig, int]:
        """The rope, and how many numbers of a head rotate: those beside the latent."""
        return self.rope, self.sizes.rope_dim

    def attention_maps(self, layer: int) -> list[tuple[int, int]]:
        """Rows and columns of the maps to latents, from them, and to the output."""
        return self.sizes.maps(self.hidden_size, self.num_heads)

    def facts(self) -> ModelFacts:
        """The facts of a decoder, with the weights of the maps to latents. The map from latents to
        heads is not quantised."""
        to_latents = self.num_layers * (self.sizes.q_rank or 0) * self.hidden_size
        facts = dataclasses.replace(NativeConfig.facts(self), num_latent_weights=to_latents)
        if (scheme := self.quantization) is None or facts.quantized is None:
            return facts
        expanding = self.sizes.expanding_map(self.num_heads)
        left_out = scheme.quantized([expanding] * self.num_layers, "attention")
        others = dataclasses.replace(
            facts.quantized,
            num_weights=facts.quantized.num_weights - left_out.num_weights,
            num_bytes=facts.quantized.num_bytes - left_out.num_bytes,
        )
        return dataclasses.replace(facts, quantized=others)


def read_config(whole: Fields, architecture: str) -> LatentConfig:
    """Raises as `read_decoder` does."""
    given, of_whole = text_part(whole)
    defaults = _DEFAULTS.get(architecture, _V3_DEFAULTS)
    # Of these null says something else than nothing.
    kept = {
        name: value
        for name, value in given.values.items()
        if value is not None or name in ("q_lora_rank", "n_shared_experts")
    }
    fields = Fields(defaults | kept, given.where)
    fields.refuse_others(_FIELDS)
    _refuse_others(fields)
    sizes = LatentSizes(
        rank=fields.count("kv_lora_rank", 512),
        q_rank=None if fields.values["q_lora_rank"] is None else fields.count("q_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        value_dim=fields.count("v_head_dim"),
    )
    if sizes.rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number")
    plain = {**fields.values, "head_dim": sizes.rope_dim, "num_key_value_heads": 1}
    experts = _read_experts(fields, architecture)
    read = read_decoder(Fields(plain, fields.where), architecture, experts=experts)
    num_drafting, of_drafting = drafting_layers(fields)
    return read.extended(
        LatentConfig,
        notes=read.notes + of_whole + of_drafting,
        num_drafting_layers=num_drafting,
        sizes=sizes,
        scale=(sizes.nope_dim + sizes.rope_dim) ** -0.5 * _of_context(fields, read.rope),
    )


def name_of(stored_name: str) -> str | None:
    """What a tensor of a checkpoint is called in the model; None for that of a tower."""
    name = stored_name.removeprefix("model.")
    if name.startswith(_TOWER):
        return None
    name = name.removeprefix("language_model.").removeprefix("model.")
    return name.replace(f".gate.{_ROUTER_BIAS}", f".{_ROUTER_BIAS}")


def name_in_drafter(stored_name: str, layer: int) -> str | None:
    """What a tensor of a checkpoint is called in the drafter, whose layer has this number; None for
    those of the model."""
    prefix, name = f"layers.{layer}.", name_of(stored_name)
    if name is None or not name.startswith(prefix):
        return None
    module, _, kind = name.removeprefix(prefix).rpartition(".")
    if module not in _OF_DRAFTER:
        return f"layers.0.{module}.{kind}"
    own = _OF_DRAFTER[module]
    return None if own is None else f"{own}.{kind}"


def _refuse_others(fields: Fields) -> None:
    """Raise UnsupportedModelError for what the code of transformers has, and this has not."""
    fields.require("attention_bias", (None, False))
    fields.require("mlp_bias", (None, False))
    fields.require("rope_interleave", (None, True))
    fields.require("moe_layer_freq", (None, 1))


def _of_context(fields: Fields, rope: RopeConfig) -> float:
    """What multiplies scores in an extended context (YaRN, arXiv 2309.00071, section 3.4)."""
    values = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    share = Fields(values, fields.where).number("mscale_all_dim", 0)
    if rope.type == "default" or rope.factor <= 1 or not share:
        return 1.0
    return float((0.1 * share * math.log(rope.factor) + 1) ** 2)


def _read_experts(fields: Fields, architecture: str) -> ExpertsConfig:
    num_layers = fields.count("num_hidden_layers")
    name = next(
        (name for name in ("num_local_experts", "num_experts") if fields.values.get(name)),
        "n_routed_experts",
    )
    routing = _read_routing(fields, architecture, num_experts := fields.count(name))
    size, num_shared = fields.count("moe_intermediate_size"), 0
    if fields.values["n_shared_experts"]:
        num_shared = fields.count("n_shared_experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=routing.top_k,
        size=size,
        normalize=routing.normalize,
        layers=_sparse_layers(fields, num_layers),
        routing=routing,
        router_bias=routing.sigmoid,
        shared_size=num_shared * size,
    )


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    name, num_dense = "first_k_dense_replace", 0
    if fields.values.get("mlp_layer_types") is None and fields.values[name]:
        num_dense = fields.count(name)
    default = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    kinds = fields.kinds("mlp_layer_types", ("dense", "sparse"), default)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _read_routing(fields: Fields, architecture: str, num_experts: int) -> GroupRouting:
    is_v2 = architecture == V2
    method = str(fields.values.get("topk_method") or (_GREEDY if is_v2 else _BY_BIAS))
    methods = (_GREEDY, _IN_GROUPS) if is_v2 else (_BY_BIAS,)
    if method not in methods:
        raise UnsupportedModelError(f"{CONFIG_FILE}: topk_method {method!r}; {one_of(methods)}")
    scoring = "softmax" if is_v2 else "sigmoid"
    fields.require("scoring_func", (None, scoring))
    normalize = fields.flag("norm_topk_prob", False)
    if is_v2 and normalize:
        raise UnsupportedModelError(f"{CONFIG_FILE}: norm_topk_prob true is not supported in {V2}.")
    num_chosen = fields.count("num_experts_per_tok")
    num_groups = num_kept = 1
    if method != _GREEDY:
        num_groups, num_kept = fields.count("n_group"), fields.count("topk_group")
    least = 1 if is_v2 else 2  # experts that a group is measured by
    each, rest = divmod(num_experts, num_groups)
    if rest or each < least or num_kept > num_groups or num_kept * each < num_chosen:
        raise CheckpointError(
            f"{CONFIG_FILE}: {num_experts} experts, n_group {num_groups}, topk_group "
            f"{num_kept} and num_experts_per_tok {num_chosen} do not fit: experts must "
            "divide into groups, of which those that are kept have as many as are chosen."
        )
    return GroupRouting(
        top_k=num_chosen,
        normalize=normalize,
        sigmoid=not is_v2,
        factor=fields.number("routed_scaling_factor"),
        num_groups=num_groups,
        num_kept=num_kept,
    )


class LatentDecoderLayer(DecoderLayer):
    """Attention over latents, then an MLP or experts."""

    def make_mixer(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        assert isinstance(config, LatentConfig)
        return LatentAttention(
            config.hidden_size, index, config.attention(index), config.sizes, format, comm
        )


class LatentForCausalLM(CausalLM):
    """DeepSeek-V2 and V3, and their relatives."""

    layer_type = LatentDecoderLayer
