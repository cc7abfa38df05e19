"""The properties of model and device that option resolution depends on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minisgl.shards import can_divide, kv_head_shard, split_layers

# Positions are exact in float32 up to this one, and no model has been made for as many.
MAX_SEQ_LEN = 1 << 24
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = {**DTYPE_BYTES, FP8: 1}


class KVScales(NamedTuple):
    """What multiplies the keys and the values that a layer's KV cache stores, to read them."""

    k: float = 1.0
    v: float = 1.0

    @property
    def inverse(self) -> tuple[float, float]:
        """What multiplies keys and values to store them."""
        return 1 / self.k, 1 / self.v


UNSCALED = KVScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The KV cache of one layer: per token, a key and a value of each KV head."""

    num_kv_heads: int
    key_dim: int
    value_dim: int  # 0: there are no values beside the keys
    dtype: str  # one of DTYPES, or FP8
    scales: KVScales = UNSCALED  # for FP8
    shared_dim: int = 0  # numbers of a key, the first, that are its value, too
    window: int | None = None  # the tokens that a query sees, the widest of all layers; None: all

    def read_by(self, reader: AttentionSpec) -> KVSpec:
        """The same, also read by a layer that attends so."""
        if self.window is None or reader.window is None:
            return replace(self, window=None)
        return replace(self, window=max(self.window, reader.window))

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of the keys of a token, and of its values."""
        return (self.num_kv_heads, self.key_dim), (self.num_kv_heads, self.value_dim)

    @property
    def bytes_per_token(self) -> int:
        per_head = self.key_dim + self.value_dim
        return self.num_kv_heads * per_head * KV_DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SharedKV:
    """A layer without a KV cache of its own, which reads that of another layer."""

    layer: int  # an earlier one, counted from the first layer of the stage


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of a request in one layer: tensors whose sizes do not depend on its length.

    Of the rows of a run, of which only the first may count, a layer keeps what it needs to advance
    the state by them once that is known.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # of each, one of DTYPES
    num_heads: int = 1  # ranks divide the first dimension of each by them
    row_sizes: tuple[int, ...] = ()  # of what is kept of a row, in the first dtype; divided as well
    num_rows: int = 0  # that are kept

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The dtype and the shape of each: of the state, then of the rows."""
        kept = [(self.dtypes[0], (self.num_rows, size)) for size in self.row_sizes]
        state = zip(self.dtypes, self.shapes, strict=True)
        return (*state, *(kept if self.num_rows else ()))

    @property
    def bytes_per_slot(self) -> int:
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in self.tensors)

    def for_runs(self, max_run: int) -> StateSpec:
        """The state of a request whose steps compute runs of up to `max_run` rows."""
        return replace(self, num_rows=max_run if max_run > 1 else 0)

    def on_rank(self, num_ranks: int) -> StateSpec:
        """The state on one of `num_ranks` ranks, which must divide the number of heads."""
        return replace(
            self,
            shapes=tuple((first // num_ranks, *others) for first, *others in self.shapes),
            num_heads=self.num_heads // num_ranks,
            row_sizes=tuple(size // num_ranks for size in self.row_sizes),
        )


LayerSpec = KVSpec | SharedKV | StateSpec  # what a layer keeps between steps


def page_bytes(layers: Iterable[LayerSpec], page_size: int) -> int:
    """Bytes of a page in the KV cache of all layers."""
    return page_size * sum(spec.bytes_per_token for spec in layers if isinstance(spec, KVSpec))


def slot_bytes(layers: Sequence[LayerSpec]) -> int:
    """Bytes of the state of a slot in all layers."""
    return sum(spec.bytes_per_slot for spec in layers if isinstance(spec, StateSpec))


WINDOWS, SOFT_CAPS, SINKS = "sliding windows", "soft caps", "attention sinks"
OTHER_VALUES, LATENTS = "values of another width", "values that are part of the keys"
ATTENTION_EXTRAS = (WINDOWS, SOFT_CAPS, SINKS, OTHER_VALUES, LATENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer: softmax(scale · q kᵀ) v over the tokens up to each query, for
    each head. Query head h reads KV head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees its last `window` tokens, itself included; None: all
    softcap: float | None = None  # scores become softcap · tanh(scores / softcap)
    sinks: bool = False  # each head has a learned logit, added to the softmax denominator only
    value_dim: int | None = None  # None: that of queries and keys, head_dim
    v_in_k: bool = False  # the values are the first value_dim numbers of the keys

    def num_visible(self, length: int) -> int:
        """The number of keys that the last of `length` tokens sees."""
        return length if self.window is None else min(length, self.window)

    def extras(self) -> tuple[str, ...]:
        """The names of its features beyond plain causal attention, of ATTENTION_EXTRAS."""
        used = {
            WINDOWS: self.window is not None,
            SOFT_CAPS: self.softcap is not None,
            SINKS: self.sinks,
            OTHER_VALUES: self.value_dim not in (None, self.head_dim),
            LATENTS: self.v_in_k,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    def kv(self, dtype: str, scales: KVScales = UNSCALED) -> KVSpec:
        """The KV cache of the layer in `dtype`."""
        spec = KVSpec(
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            dtype=dtype,
            scales=scales,
            window=self.window,
        )
        if not self.v_in_k:
            return spec
        scales, shared_dim = KVScales(scales.k, scales.k), spec.value_dim
        return replace(spec, value_dim=0, scales=scales, shared_dim=shared_dim, window=None)

    def on_rank(self, num_ranks: int) -> AttentionSpec:
        """The attention of one of `num_ranks` ranks, which must divide the number of heads."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=kv_head_shard(self.num_kv_heads, 0, num_ranks).size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The quantised among some matrices."""

    num_weights: int
    num_bytes: int  # with their scales and zero points
    rounds: bool  # whether inputs are rounded to 8 bits, where the device has products of that
    multiple: int  # of which the inputs of a map must be one on each rank

    def beside(self, other: Quantized) -> Quantized:
        """These and others together."""
        return Quantized(
            num_weights=self.num_weights + other.num_weights,
            num_bytes=self.num_bytes + other.num_bytes,
            rounds=self.rounds or other.rounds,
            multiple=math.lcm(self.multiple, other.multiple),
        )


def _matrix_bytes(num_weights: int, dtype: str, quantized: Quantized | None) -> int:
    """The bytes of matrices of which some may be quantised, the others in `dtype`."""
    if quantized is None:
        return num_weights * DTYPE_BYTES[dtype]
    return (num_weights - quantized.num_weights) * DTYPE_BYTES[dtype] + quantized.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Properties of the layers with experts."""

    num_layers: int
    num_experts: int  # per layer
    num_chosen: int  # per token
    num_weights: int  # in the matrices of one expert
    size: int  # inner dimension of one expert, which ranks divide; 0: they do not
    inner_block: int = 1  # a rank's part of it is whole blocks of so many, the last ones padded
    quantized: Quantized | None = None  # of these
    not_by_rank: str | None = None  # why ranks cannot have whole experts; None: they can

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the matrices of one expert, in a model that computes in `dtype`."""
        return _matrix_bytes(self.num_weights, dtype, self.quantized)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of the model that option resolution needs."""

    dtype: str  # of the checkpoint, one of DTYPES
    max_seq_len: int
    max_seq_len_reason: str | None  # why a longer --max-seq-len-override is refused; None: allowed
    vocab_size: int
    layers: tuple[AttentionSpec | StateSpec, ...]  # what each attends to, or keeps instead
    # The greatest common divisor of the inner sizes of MLPs and of experts that all rows take.
    intermediate_size: int
    num_layer_weights: int  # in the matrices of all layers, without experts
    num_head_weights: int  # in the matrix that computes the logits
    num_attention_weights: int = 0  # of those of the layers: of attention, and of states
    num_latent_weights: int = 0  # of attention: on every rank, whatever part of the heads it has
    num_whole_weights: int = 0  # of those of the layers: on every rank, as of routers
    tied: bool = False  # the head is the embedding
    divides_embedding: bool = True  # each rank has a part of it; else the whole, beside its head
    experts: ExpertFacts | None = None
    quantized: Quantized | None = None  # of the layers' matrices, without experts
    kv_scales: tuple[KVScales, ...] | None = None  # one per layer; None: the checkpoint has none
    one_rank: str | None = None  # why the model cannot be divided over ranks; None: it can
    one_stage: str | None = None  # why it cannot be split into stages; None: it can
    # Each rank attends for its own heads; else each for all, perhaps of requests of its own.
    divides_heads: bool = True
    divides_requests: bool = True  # ranks can attend for their own, which no proof has to show
    # Of the network that drafts, whose KV lies in the same pages.
    draft_layers: tuple[AttentionSpec, ...] = ()
    drafts_look_ahead: bool = False  # its KV of a token depends on the next one

    @property
    def fp8_activations(self) -> bool:
        """Whether products of layers or experts round their inputs to FP8, where the device can
        multiply that, or to INT8, which then is as fast."""
        parts = (self.quantized, self.experts and self.experts.quantized)
        return any(part.rounds for part in parts if part)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Of each layer that attends, also of those that draft."""
        of_layers = tuple(spec for spec in self.layers if isinstance(spec, AttentionSpec))
        return of_layers + self.draft_layers

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Of each layer that keeps a state instead."""
        return tuple(spec for spec in self.layers if isinstance(spec, StateSpec))

    def layer_specs(self, dtype: str) -> tuple[KVSpec | StateSpec, ...]:
        """What each layer keeps, with KV caches in `dtype`: one of DTYPES, or FP8; those that draft
        come last."""
        scales = [UNSCALED] * len(self.layers)
        if dtype == FP8 and self.kv_scales is not None:
            scales = list(self.kv_scales)
        of_layers = tuple(
            spec.kv(dtype, own_scales) if isinstance(spec, AttentionSpec) else spec
            for spec, own_scales in zip(self.layers, scales, strict=True)
        )
        return of_layers + tuple(spec.kv(dtype) for spec in self.draft_layers)

    def kv_specs(self, dtype: str) -> tuple[KVSpec, ...]:
        """The KV cache of each layer that attends, in `dtype` as for layer_specs."""
        return tuple(spec for spec in self.layer_specs(dtype) if isinstance(spec, KVSpec))

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes per token of the KV caches of all layers in `dtype`."""
        return sum(spec.bytes_per_token for spec in self.kv_specs(dtype))

    def seen_share(self, length: int) -> float:
        """The share of the bytes in the KV cache of a request of `length` tokens that its next
        token reads: 1 without sliding windows."""
        layers = zip(self.attention, self.kv_specs(self.dtype), strict=True)
        read = sum(spec.num_visible(length) * kv.bytes_per_token for spec, kv in layers)
        return read / (length * self.kv_bytes_per_token(self.dtype))

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the matrices of layers and head, without experts, in a model that computes in
        `dtype`."""
        head = self.num_head_weights * DTYPE_BYTES[dtype]
        return head + _matrix_bytes(self.num_layer_weights, dtype, self.quantized)

    def can_divide(self, num_ranks: int, *, by_rank: bool = False) -> bool:
        """True if the model can be sharded over `num_ranks` ranks. by_rank: each has whole
        experts."""
        heads = self.divides_heads
        if not by_rank and self.experts is not None and self.experts.size % num_ranks:
            return False
        if heads and any(spec.num_heads % num_ranks for spec in self.states):
            return False
        return (self.one_rank is None or num_ranks == 1) and all(
            can_divide(
                num_ranks,
                num_heads=spec.num_heads if heads else num_ranks,
                num_kv_heads=spec.num_kv_heads if heads else num_ranks,
                intermediate_size=self.intermediate_size,
                vocab_size=self.vocab_size,
            )
            for spec in set(self.attention)
        )

    def on_rank(self, num_ranks: int) -> ModelFacts:
        """The facts for one of `num_ranks` ranks. Requires `can_divide(num_ranks)`."""
        if not self.divides_heads:
            return self
        return replace(
            self,
            layers=tuple(spec.on_rank(num_ranks) for spec in self.layers),
            draft_layers=tuple(spec.on_rank(num_ranks) for spec in self.draft_layers),
        )

    def stages(self, num_stages: int) -> tuple[range, ...]:
        """The layers of each of `num_stages` pipeline stages, of about equal work in decoding,
        which reads every weight once."""
        # In the checkpoint's dtype: another changes the sizes of head and layers alike, or nearly.
        dtype = self.dtype
        layers = _matrix_bytes(self.num_layer_weights, dtype, self.quantized)
        if self.experts is not None:
            num_experts = self.experts.num_layers * self.experts.num_experts
            layers += num_experts * self.experts.weight_bytes(dtype)
        num_layers = len(self.layers)
        head = self.num_head_weights * DTYPE_BYTES[dtype] * num_layers / layers
        return split_layers(num_layers, num_stages, head)

    def on_stage(self, layers: range) -> ModelFacts:
        """The facts for a stage with these layers, as far as they are facts about layers."""
        part = slice(layers.start, layers.stop)
        scales = self.kv_scales
        return replace(
            self,
            layers=self.layers[part],
            kv_scales=None if scales is None else scales[part],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What an attention backend can do beyond causal attention in half precision on a GPU, as its
    file in attention/ declares it."""

    name: str  # one of ATTENTION_BACKENDS
    prefill_rank: int  # the least is the best
    decode_rank: int
    fp8_rank: int | None = None  # comes before the others with an FP8 KV cache; None: reads none
    # What users should know of prefill and of decode that read FP8.
    fp8_prefill_note: str = ""
    fp8_decode_note: str = ""
    extras: tuple[str, ...] = ()  # what it computes of ATTENTION_EXTRAS
    runs_on_cpu: bool = False
    float32: bool = False
    captures_decode: bool = False  # takes no argument from the host that changes between steps
    captures_chunks: bool = False  # reads the bounds of chunks on the device
    most_prompt_tokens: int | None = None  # of a step; None: any number
    # Of equally fast sizes the smallest, since smaller pages share more of a prefix.
    best_page_size: int = 16
    page_sizes: tuple[int, ...] = ()  # the only ones; empty: any
    page_multiple: int = 1
    pages_are_powers_of_two: bool = False


def best_first(
    backends: Iterable[BackendFacts], phase: str, *, fp8: bool = False
) -> tuple[BackendFacts, ...]:
    """Sort by the ranks for a phase, prefill or decode. fp8: whether the KV cache is in FP8."""

    def rank(backend: BackendFacts) -> tuple[int, int]:
        of_phase = backend.prefill_rank if phase == "prefill" else backend.decode_rank
        return (backend.fp8_rank or 0) if fp8 else 0, of_phase

    return tuple(sorted(backends, key=rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Properties of the machine that option resolution needs."""

    has_cuda: bool
    free_cpu_bytes: int
    gpu_bytes: int = 0  # the memory of a GPU
    cpu_bytes: int = 0  # of the machine, or of the container with its limit; 0: unknown
    num_gpus: int = 0
    compute_capability: tuple[int, int] | None = None  # of the GPUs; None: there are none
    backends: tuple[BackendFacts, ...] = ()  # all that are declared
    missing_backends: dict[str, str] = field(default_factory=dict)  # why some cannot run the model
