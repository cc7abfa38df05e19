"""What options depend on: the facts about the model and about the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minisgl.shards import can_divide, kv_head_shard

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Of the layers with experts."""

    num_layers: int
    num_experts: int  # in each
    num_chosen: int  # by a token
    num_weights: int  # in the matrices of one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the options depend on, of the model."""

    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    max_seq_len: int
    max_seq_len_reason: str | None  # why a longer --max-seq-len-override is refused; None: allowed
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of MLPs and experts: what divides it divides all of them
    num_layer_weights: int  # in the matrices of all layers, experts left out
    num_head_weights: int  # in the matrix that makes logits
    experts: ExpertFacts | None = None

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def can_divide(self, num_ranks: int) -> bool:
        return can_divide(
            num_ranks,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )

    def on_rank(self, num_ranks: int) -> ModelFacts:
        """With the heads that one of so many ranks computes, which must divide the model."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=kv_head_shard(self.num_kv_heads, 0, num_ranks).size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the options depend on, of the machine."""

    has_cuda: bool
    free_cpu_bytes: int
    num_gpus: int = 0
    # Those that run the model on the GPU in half precision, best first.
    prefill_backends: tuple[str, ...] = ()
    decode_backends: tuple[str, ...] = ()
    missing_backends: dict[str, str] = field(default_factory=dict)  # why the others do not
    flash_page_multiple: int = 1  # pages of fa must have a multiple of so many tokens
