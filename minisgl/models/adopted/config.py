"""What is known of an adopted model before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.config import ModelFacts
from minisgl.models.adopted.discover import Discovered
from minisgl.models.config import ModelConfig

ONE_RANK = "this model runs with transformers' code, which minisgl does not divide over ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedConfig(ModelConfig):
    """A model that runs with transformers' modeling code."""

    values: dict[str, Any]  # of config.json, or of its text part
    found: Discovered
    has_towers: bool  # beside the text part, which alone runs
    transformers: str  # its version

    def facts(self) -> ModelFacts:
        """As in ModelConfig."""
        return facts_of(self.found, self.dtype, self.vocab_size, self.max_seq_len, self)


def facts_of(
    found: Discovered,
    dtype: str,
    vocab_size: int,
    max_seq_len: int,
    config: ModelConfig | None = None,
) -> ModelFacts:
    """The facts of a model with these layers. config: says more, if there is one."""
    return ModelFacts(
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_seq_len_reason=None if config is None else config.max_seq_len_reason,
        vocab_size=vocab_size,
        attention=found.attention,
        intermediate_size=1,
        num_layer_weights=found.num_weights,
        num_head_weights=found.num_head_weights,
        experts=found.experts,
        kv_scales=None if config is None else config.kv_scales,
        one_rank=ONE_RANK,
    )
