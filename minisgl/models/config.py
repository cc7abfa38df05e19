"""The architecture of a decoder, as the readers of config.json describe it to the modules."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

from minisgl.config import (
    AttentionSpec,
    ExpertFacts,
    KVScales,
    ModelFacts,
    StateSpec,
)
from minisgl.layers.experts import ExpertsConfig
from minisgl.models.formats import QuantizedFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. Fields that `type` does not use have no effect."""

    # default, linear, llama3, yarn or dynamic; dynamic equals default up to original_max_position
    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # by which the context was extended
    original_max_position: int = 0  # the context length before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn; multiplies cos and sin
    share: float = 1.0  # of the pairs of a head that rotate, the first; the others stand still


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """What is known of every model before its weights are read."""

    architecture: str
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_seq_len: int  # longest sequence for which minisgl computes what the model defines
    max_seq_len_reason: str | None  # why max_seq_len is a hard limit; None: it may be exceeded
    notes: tuple[str, ...]  # logged at start
    quantization: QuantizedFormat | None = None  # of the linear maps of layers; None: not quantised
    kv_scales: tuple[KVScales, ...] | None = None  # of FP8 caches; None: the checkpoint has none
    experts_by_rank: bool = False  # each rank has whole experts (--ep); else a part of each
    num_drafting_layers: int = 0  # behind the others in a checkpoint; left aside

    @abstractmethod
    def facts(self) -> ModelFacts:
        """The properties of the model that option resolution needs."""

    @abstractmethod
    def by_request(self) -> Self:
        """The model whose ranks divide requests in attention, in place of heads. Raises
        ConfigError."""


Kind = TypeVar("Kind", bound="NativeConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig(ModelConfig):
    """A decoder of minisgl's own: grouped-query attention, then a gated MLP or experts, in every
    layer."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer, in tokens; None: it sees all
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    experts: ExpertsConfig | None = None
    norm_adds_one: bool = False  # of all norms but that behind a state: 1 + weight multiplies
    has_gate: bool = False  # attention multiplies its result by the sigmoid of another map
    rotary_dim: int | None = None  # numbers of a head that are rotated, the first; None: all
    sinks: bool = False  # whether each head has a logit of attention to nothing
    divides_heads: bool = True  # among ranks, or else requests: each rank has all heads for its own

    def extended(self, kind: type[Kind], **more: Any) -> Kind:
        """The same decoder as one of a family, with what that adds or changes."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(self)} | more)

    def layer(self, layer: int) -> AttentionSpec | StateSpec:
        """What layer `layer` attends to, or keeps instead."""
        return self.attention(layer)

    def attention(self, layer: int) -> AttentionSpec:
        """What the attention of layer `layer` computes."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
            sinks=self.sinks,
        )

    def rotation(self, layer: int) -> tuple[RopeConfig, int]:
        """How positions become angles in layer `layer`, and how many numbers of a head rotate."""
        return self.rope, self.rotary_dim or self.head_dim

    def attention_maps(self, layer: int) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of the attention of layer `layer`."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads
        kv *= self.head_dim
        return [(q * (1 + self.has_gate), hidden), (kv, hidden), (kv, hidden), (hidden, q)]

    def state_maps(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of what a layer with a state has in its place."""
        return []

    def by_request(self) -> Self:
        """The same decoder whose ranks divide requests in attention, in place of heads."""
        return replace(self, divides_heads=False)

    def facts(self) -> ModelFacts:
        """The properties that option resolution needs, from the sizes of the matrices."""
        hidden, scheme = self.hidden_size, self.quantization
        num_sparse = len(self.experts.layers) if self.experts else 0
        num_dense = self.num_layers - num_sparse
        layers = tuple(map(self.layer, range(self.num_layers)))
        maps: list[tuple[int, int]] = []
        for layer, spec in enumerate(layers):
            has_state = isinstance(spec, StateSpec)
            maps += self.state_maps() if has_state else self.attention_maps(layer)
        num_attention_weights = sum(n * k for n, k in maps)
        mlps = num_dense * _gated_mlp(hidden, self.intermediate_size)
        if self.experts is not None and self.experts.shared_size:
            mlps += num_sparse * _gated_mlp(hidden, self.experts.shared_size)
        num_layer_weights = num_attention_weights + sum(n * k for n, k in mlps)
        quantized = None
        if scheme is not None and not scheme.only_experts:
            of_mlps = scheme.quantized(mlps, "mlp")
            quantized = scheme.quantized(maps, "attention").beside(of_mlps)
        inner_sizes = [self.intermediate_size] if num_dense else []
        expert_facts, num_router_weights = None, 0
        if self.experts is not None and num_sparse:
            if self.experts.shared_size:
                inner_sizes.append(self.experts.shared_size)
            num_router_weights = num_sparse * hidden * self.experts.num_experts
            expert = _gated_mlp(hidden, self.experts.size)
            expert_facts = ExpertFacts(
                num_layers=num_sparse,
                num_experts=self.experts.num_experts,
                num_chosen=self.experts.num_chosen,
                num_weights=sum(n * k for n, k in expert),
                size=self.experts.size,
                inner_block=self.experts.inner_block,
                quantized=None if scheme is None else scheme.quantized(expert, "experts"),
            )
        return ModelFacts(
            dtype=self.dtype,
            max_seq_len=self.max_seq_len,
            max_seq_len_reason=self.max_seq_len_reason,
            vocab_size=self.vocab_size,
            layers=layers,
            intermediate_size=math.gcd(*inner_sizes),
            num_layer_weights=num_layer_weights + num_router_weights,
            num_head_weights=self.hidden_size * self.vocab_size,
            num_attention_weights=num_attention_weights,
            num_whole_weights=num_router_weights,
            tied=self.tie_word_embeddings,
            experts=expert_facts,
            quantized=quantized,
            kv_scales=self.kv_scales,
            divides_heads=self.divides_heads,
        )


def _gated_mlp(hidden: int, inner: int) -> list[tuple[int, int]]:
    """Rows and columns of its matrices."""
    return [(inner, hidden), (inner, hidden), (hidden, inner)]
