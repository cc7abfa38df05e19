"""Gemma 4, dense or with experts beside the MLP of every layer. Of models that also see images or
hear, the text part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config import AttentionSpec
from minisgl.distributed.communicator import Communicator
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.reference import PostNorm
from minisgl.kernels.moe.reference import ByRouter, Routing
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.attention import SelfAttention
from minisgl.layers.by_request import mixed_apart
from minisgl.layers.experts import ExpertsConfig, FusedExperts
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, parameter
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.post_norm import PostNormed
from minisgl.layers.step import Step
from minisgl.models.config import NativeConfig, RopeConfig
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.decoder_reader import DECODER_FIELDS, read_decoder, read_rope
from minisgl.models.text_part import text_part
from minisgl.models.transformer import CausalLM, DecoderLayer
from minisgl.shards import whole

TEXT = "Gemma4ForCausalLM"
WITH_TOWERS = "Gemma4ForConditionalGeneration"

# What lies beside the text part, without 'model.'.
_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
# vocab_size_per_layer_input and use_double_wide_mlp have no effect without what is refused.
_FIELDS = DECODER_FIELDS | field_names(
    """attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim
    hidden_activation hidden_size_per_layer_input moe_intermediate_size num_experts
    num_global_key_value_heads num_kv_shared_layers per_layer_config top_k_experts
    use_bidirectional_attention use_double_wide_mlp vocab_size_per_layer_input"""
)
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(NativeConfig):
    """A decoder whose global layers have other heads than the ones with a window."""

    global_layers: frozenset[int]
    global_head_dim: int
    num_global_kv_heads: int
    global_rope: RopeConfig
    shares_kv: bool  # the values of global layers are their keys, before norm and rotation
    softcap: float | None  # of the logits

    def attention(self, layer: int) -> AttentionSpec:
        """Attention without a scale; global layers have heads of their own."""
        is_global = layer in self.global_layers
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_global_kv_heads if is_global else self.num_kv_heads,
            head_dim=self.global_head_dim if is_global else self.head_dim,
            scale=1.0,  # queries and keys are normed
            window=self.windows[layer],
        )

    def rotation(self, layer: int) -> tuple[RopeConfig, int]:
        """The rope of layer `layer`, and how many numbers of a head rotate: all."""
        is_global = layer in self.global_layers
        return (self.global_rope, self.global_head_dim) if is_global else (self.rope, self.head_dim)

    def v_is_k(self, layer: int) -> bool:
        """Whether layer `layer` has no map to values of its own."""
        return self.shares_kv and layer in self.global_layers

    def attention_maps(self, layer: int) -> list[tuple[int, int]]:
        """Rows and columns of the matrices; values that are the keys have none."""
        spec, hidden = self.attention(layer), self.hidden_size
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return [(q, hidden), *[(kv, hidden)] * (1 if self.v_is_k(layer) else 2), (hidden, q)]


def read_config(whole_config: Fields, architecture: str) -> GemmaConfig:
    """Raises as `read_decoder` does."""
    fields, notes = text_part(whole_config)
    if fields is not whole_config:  # which decides
        tied = {"tie_word_embeddings": whole_config.flag("tie_word_embeddings", True)}
        fields = Fields({**fields.values, **tied}, fields.where)
    given = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields(_DEFAULTS | given, fields.where)
    fields.refuse_others(_FIELDS)
    _refuse_others(fields)
    num_layers = fields.count("num_hidden_layers")
    kinds = _kinds(fields, num_layers)
    global_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    window = fields.count("sliding_window")
    shares_kv = fields.flag("attention_k_eq_v", False)
    local_rope, global_rope = (_read_rope(fields, kind) for kind in (_SLIDING, _FULL))
    plain = {
        **fields.values,
        "hidden_act": None,  # the other is read
        "layer_types": kinds,
        "rope_parameters": {"rope_type": "default", "rope_theta": local_rope.theta},
    }
    read = read_decoder(
        Fields(plain, fields.where),
        architecture,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=True,
        windows=tuple(None if layer in global_layers else window for layer in range(num_layers)),
        experts=_read_experts(fields, num_layers),
    )
    head_dim, num_kv_heads = _global_heads(fields, read, global_layers, shares_kv=shares_kv)
    softcap = None
    if fields.values.get("final_logit_softcapping"):
        softcap = fields.number_above(0, "final_logit_softcapping")
    return read.extended(
        GemmaConfig,
        notes=(*read.notes, *notes),
        global_layers=global_layers,
        global_head_dim=head_dim,
        num_global_kv_heads=num_kv_heads,
        global_rope=global_rope,
        shares_kv=shares_kv,
        softcap=softcap,
    )


def name_of(stored_name: str) -> str | None:
    """What a tensor of a checkpoint is called in the model; None for those of towers."""
    name = stored_name.removeprefix("model.")
    if name.startswith(_TOWERS):
        return None
    name = name.removeprefix("language_model.").removeprefix("model.")
    return f"{name}.weight" if name.endswith(".router.scale") else name


def _refuse_others(fields: Fields) -> None:
    """Raise UnsupportedModelError for what models of this family have, and not the code here."""
    missing = []
    if width := fields.values.get("hidden_size_per_layer_input"):
        missing.append(f"embeddings of each layer (hidden_size_per_layer_input {width!r})")
    if num_shared := fields.values.get("num_kv_shared_layers"):
        missing.append(
            f"layers that read the KV cache of others (num_kv_shared_layers {num_shared!r})"
        )
    if missing:
        raise UnsupportedModelError(
            f"minisgl's own code of Gemma 4 has no {' and no '.join(missing)}"
        )
    fields.require("hidden_activation", ("gelu_pytorch_tanh",))
    # That of "vision" is between the tokens of an image.
    fields.require(
        "use_bidirectional_attention", (None, "vision"), ": tokens attend to earlier ones"
    )


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """The kind of each layer, of which the last is always global."""
    default = [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(num_layers)]
    return [*fields.kinds("layer_types", (_SLIDING, _FULL), default)[:-1], _FULL]


def _read_rope(fields: Fields, kind: str) -> RopeConfig:
    """Proportional rope is the plain one of some of a head's pairs, if there is a factor with
    positions divided by it."""
    ropes = fields.values["rope_parameters"]
    where = f"{fields.where}: rope_parameters"
    rope = ropes.get(kind) if isinstance(ropes, dict) else None
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where} has no {kind}.")
    type_ = rope.get("rope_type", "default")
    if type_ not in (("default", "proportional") if kind == _FULL else ("default",)):
        raise UnsupportedModelError(f"{where}: rope_type {type_!r} of {kind} is not supported.")
    inner, share = Fields(rope, where), 1.0
    plain: dict[str, Any] = {**rope, "rope_type": "default"}
    if type_ == "proportional":
        plain.pop("partial_rotary_factor", None)
        share = inner.number_above(0, "partial_rotary_factor", 1.0)
        if share > 1:
            raise inner.wrong("partial_rotary_factor", "a share from 0 to 1")
        if rope.get("factor") is not None:
            plain["rope_type"] = "linear"
    read = read_rope(
        Fields({"rope_parameters": plain}, fields.where), fields.count("max_position_embeddings")
    )
    return dataclasses.replace(read, share=share)


def _global_heads(
    fields: Fields, read: NativeConfig, layers: frozenset[int], *, shares_kv: bool
) -> tuple[int, int]:
    """Width and number of the KV heads of global layers. transformers 5.24 writes them layer by
    layer."""
    head_dim = fields.count("global_head_dim", 512)
    num_kv_heads = read.num_kv_heads
    if shares_kv:
        num_kv_heads = fields.count("num_global_key_value_heads", num_kv_heads)
    by_layer = fields.values.get("per_layer_config")
    if by_layer is not None:
        names = {"head_dim", "num_key_value_heads"}
        of_global = {str(layer) for layer in layers}
        if (
            not isinstance(by_layer, dict)
            or by_layer.keys() != of_global
            or not all(
                isinstance(each, dict) and each.keys() <= names for each in by_layer.values()
            )
            or any(each != by_layer[min(of_global)] for each in by_layer.values())
        ):
            raise UnsupportedModelError(
                f"{fields.where}: per_layer_config is not supported unless all global layers, and "
                "no others, have one head_dim and num_key_value_heads."
            )
        of_each = Fields(by_layer[min(of_global)], f"{fields.where}: per_layer_config")
        head_dim = of_each.count("head_dim", read.head_dim)
        num_kv_heads = of_each.count("num_key_value_heads", read.num_kv_heads)
    if read.num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{fields.where}: {read.num_heads} heads, {num_kv_heads} global KV heads and a "
            f"global head_dim of {head_dim} do not fit: heads must divide into KV heads and "
            "head_dim must be even."
        )
    return head_dim, num_kv_heads


def _read_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """The MLP beside them is a shared expert."""
    if not fields.flag("enable_moe_block", False):
        return None
    return ExpertsConfig(
        num_experts=fields.count("num_experts"),
        num_chosen=fields.count("top_k_experts"),
        size=fields.count("moe_intermediate_size"),
        normalize=True,
        layers=frozenset(range(num_layers)),
        shared_size=fields.count("intermediate_size"),
    )


class Router(nn.Module):
    """Chooses experts by the rows of the stream: by their norm, times `scale` / √hidden_size."""

    def __init__(
        self, hidden_size: int, experts: ExpertsConfig, eps: float, format: WeightFormat
    ) -> None:
        super().__init__()
        self.scale = RMSNorm(hidden_size, eps, format.dtype, factor=hidden_size**-0.5)
        self.proj = Linear(whole(hidden_size), {"proj": whole(experts.num_experts)}, format)
        self.per_expert_scale = parameter(torch.empty(experts.num_experts, dtype=format.dtype))
        self._routing = Routing(experts.num_chosen, experts.normalize)

    def forward(self, x: Tensor, rows: Rows) -> ByRouter:
        """x: the norm."""
        return ByRouter(self.proj(x, rows), self._routing, self.per_expert_scale)


class GemmaLayer(DecoderLayer):
    """Attention, then an MLP and experts beside it, if there are some. The result of each block is
    normed before it is added to the stream, and the stream multiplied by a number at the end."""

    def __init__(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> None:
        super().__init__(config, index, format, comm)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, format.dtype)

        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.layer_scalar = parameter(torch.ones(1, dtype=format.dtype))
        experts = config.experts
        self.has_experts = experts is not None
        if experts is not None:
            self.router = Router(
                config.hidden_size, experts, config.norm_eps, format.within("router")
            )
            self.experts = FusedExperts(
                experts.num_experts,
                config.hidden_size,
                experts.size,
                format.within("experts"),
                comm,
                gelu=True,
                by_rank=config.experts_by_rank,
            )
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
            self.pre_feedforward_layernorm_2 = norm()

    def make_mixer(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        assert isinstance(config, GemmaConfig)
        return SelfAttention(
            config.hidden_size,
            index,
            config.attention(index),
            format,
            comm,
            qkv_bias=config.qkv_bias,
            o_bias=config.qkv_bias,
            qk_norm_eps=config.norm_eps,
            norms_v=True,
            v_is_k=config.v_is_k(index),
        )

    def make_mlp(
        self, config: NativeConfig, index: int, format: WeightFormat, comm: Communicator
    ) -> nn.Module:
        size = config.intermediate_size
        return GatedMLP(config.hidden_size, size, format, comm, bias=False, gelu=True)

    def forward(self, residual: Residual, step: Step) -> Residual:
        attention, norm = self.get_submodule(self._mixer), self.input_layernorm
        assert isinstance(attention, SelfAttention)
        result, stream = mixed_apart(attention.apart, residual, norm, step, self._ranks)
        attended = PostNormed((result,), _post(self.post_attention_layernorm))
        post = _post(self.post_feedforward_layernorm, scale=self.layer_scalar)
        mlp, rows = self.mlp, step.batch.rows
        assert isinstance(mlp, GatedMLP)
        if not self.has_experts:
            residual = Residual(stream, pending=attended)
            inner, stream = mlp.inner_of_norm(residual, self.pre_feedforward_layernorm, rows)
            result = mlp.down_proj.summed(mlp.down_proj(inner, rows))
            return Residual(stream, pending=PostNormed((result,), post))
        norms = (
            self.pre_feedforward_layernorm,
            self.pre_feedforward_layernorm_2,
            self.router.scale,
        )
        (x, of_experts, of_router), stream = attended.norms(
            stream, tuple(norm.weight for norm in norms)
        )
        results = (
            mlp.down_proj.summed(mlp.summand(x, rows)),
            self.experts.summed(of_experts, self.router(of_router, rows), rows),
        )
        one, other = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        post = post._replace(inner=(one.weight, other.weight))
        return Residual(stream, pending=PostNormed(results, post))


def _post(norm: RMSNorm, scale: Tensor | None = None) -> PostNorm:
    return PostNorm(norm.weight, norm.eps, scale=scale)


class GemmaForCausalLM(CausalLM):
    """Gemma 4."""

    layer_type = GemmaLayer

    def __init__(self, config: GemmaConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._softcap = config.softcap
        if self.embed_tokens is not None:
            # Rounded as its product with a row is.
            scale = torch.tensor(config.hidden_size**0.5, dtype=self.embed_tokens.weight.dtype)
            self.embed_tokens.scale = float(scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """The rank's part of the logits, with the config's soft cap."""
        logits = super().logits(hidden)
        return logits if self._softcap is None else dispatch.soft_cap(logits, self._softcap)
