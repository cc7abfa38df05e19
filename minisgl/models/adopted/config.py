"""What is known of an adopted model before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from minisgl.config import KVScales, ModelFacts
from minisgl.errors import ConfigError
from minisgl.models.adopted.discover import Discovered
from minisgl.models.adopted.division import Divisibility
from minisgl.models.adopted.known import Known
from minisgl.models.adopted.swap import Way
from minisgl.models.config import ModelConfig
from minisgl.models.formats import QuantizedFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedConfig(ModelConfig):
    """A model that runs with transformers' modeling code."""

    values: dict[str, Any]  # of config.json, or of its text part
    found: Discovered
    known: Known
    way: Way
    divides: Divisibility
    has_towers: bool  # beside the text part, which alone runs
    transformers: str  # its version
    attends_by_request: bool = False  # ranks divide the requests in attention

    def by_request(self) -> Self:
        """The model whose ranks divide requests in attention, in place of heads. Only its
        proof tells whether its code allows that. Raises ConfigError."""
        if self.found.has_position_table:
            reason = "in this model rows of a table are added to all rows, by their positions"
            raise ConfigError("--dp-attention", True, f"{reason}; allowed: off")
        return replace(self, attends_by_request=True)

    def facts(self) -> ModelFacts:
        """The properties of the model that option resolution needs, as they were discovered."""
        facts = facts_of(
            self.found,
            self.dtype,
            self.vocab_size,
            self.max_seq_len,
            max_seq_len_reason=self.max_seq_len_reason,
            divides=self.divides,
            scheme=self.quantization,
            kv_scales=self.kv_scales,
        )
        return replace(facts, divides_heads=False) if self.attends_by_request else facts


def facts_of(
    found: Discovered,
    dtype: str,
    vocab_size: int,
    max_seq_len: int,
    *,
    divides: Divisibility,
    max_seq_len_reason: str | None = None,
    scheme: QuantizedFormat | None = None,
    kv_scales: tuple[KVScales, ...] | None = None,
) -> ModelFacts:
    """The facts of a model with these layers."""
    experts = found.experts
    if experts is not None:
        experts = replace(
            experts,
            size=divides.expert_size,
            quantized=None if scheme is None else scheme.quantized(found.expert_sizes, "experts"),
            not_by_rank=divides.not_by_rank,
        )
    return ModelFacts(
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_seq_len_reason=max_seq_len_reason,
        vocab_size=vocab_size,
        layers=found.attention,
        intermediate_size=divides.common_size,
        num_layer_weights=found.num_weights,
        num_head_weights=found.num_head_weights,
        num_attention_weights=divides.num_attention_weights,
        num_whole_weights=divides.num_whole_weights,
        tied=divides.tied,
        divides_embedding=False,
        experts=experts,
        quantized=None if scheme is None else scheme.quantized(found.map_sizes),
        kv_scales=kv_scales,
        one_rank=divides.one_rank,
        one_stage=divides.one_stage,
        divides_heads=divides.divides_heads,
        divides_requests=False,
    )
