"""What a checkpoint's config.json says about the arithmetic of its model.

The reader is strict: a field that it does not know may change the arithmetic, so a field that is
neither read, nor known to be harmless, nor switched off is refused by name. Spellings of
transformers 4 (rope_scaling, rope_theta, torch_dtype) and 5 (rope_parameters, dtype) are read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import DTYPES, ExpertFacts, ModelFacts
from minisgl.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, one_of

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. Fields that the type does not use mean nothing."""

    # default, linear, llama3, yarn or dynamic, which up to original_max_position is as default
    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # how far the context was stretched
    original_max_position: int = 0  # the context before it was stretched
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn; multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that takes the place of the MLP in some layers."""

    num_experts: int
    num_chosen: int  # by each token
    size: int  # of an expert's MLP, between its two products
    normalize: bool  # the chosen experts' weights add up to 1
    layers: frozenset[int]  # those that have it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: attention with grouped heads, and a gated MLP or experts in every layer."""

    architecture: str
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_seq_len: int  # up to which the arithmetic here is the model's
    max_seq_len_reason: str | None  # why it cannot be longer; None: it can
    notes: tuple[str, ...]  # what the log should say at start
    experts: ExpertsConfig | None = None

    def facts(self) -> ModelFacts:
        """What the engine's options depend on."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # of q and o, of k and v
        num_layer_weights = self.num_layers * self.hidden_size * heads * self.head_dim
        num_sparse = len(self.experts.layers) if self.experts else 0
        num_dense = self.num_layers - num_sparse
        num_layer_weights += num_dense * 3 * self.hidden_size * self.intermediate_size
        inner_sizes = [self.intermediate_size] if num_dense else []
        expert_facts = None
        if self.experts is not None and num_sparse:
            inner_sizes.append(self.experts.size)
            num_layer_weights += num_sparse * self.hidden_size * self.experts.num_experts
            expert_facts = ExpertFacts(
                num_layers=num_sparse,
                num_experts=self.experts.num_experts,
                num_chosen=self.experts.num_chosen,
                num_weights=3 * self.hidden_size * self.experts.size,
            )
        return ModelFacts(
            dtype=self.dtype,
            max_seq_len=self.max_seq_len,
            max_seq_len_reason=self.max_seq_len_reason,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=math.gcd(*inner_sizes),
            num_layer_weights=num_layer_weights,
            num_head_weights=self.hidden_size * self.vocab_size,
            experts=expert_facts,
        )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Where the supported architectures differ, and what each assumes of a field left out."""

    qkv_bias: bool = False  # always; otherwise where attention_bias says so
    qk_norm: bool = False
    optional_biases: frozenset[str] = frozenset()  # the fields that switch a bias on
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    window_switch: bool = False  # the sliding window only counts with use_sliding_window
    window_everywhere: bool = False  # and then in every layer
    default_window: int | None = None
    experts: bool = False


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(optional_biases=_words("attention_bias mlp_bias")),
    "MistralForCausalLM": _Architecture(default_window=4096),
    "Qwen2ForCausalLM": _Architecture(qkv_bias=True, window_switch=True, default_window=4096),
    "Qwen3ForCausalLM": _Architecture(
        qk_norm=True,
        optional_biases=_words("attention_bias"),
        head_dim=128,
        window_switch=True,
        default_window=4096,
    ),
    "Qwen3MoeForCausalLM": _Architecture(
        qk_norm=True,
        optional_biases=_words("attention_bias"),
        window_switch=True,
        window_everywhere=True,
        default_window=4096,
        experts=True,
    ),
}

_READ_FIELDS = _words(
    """architectures dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps tie_word_embeddings
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor sliding_window use_sliding_window max_window_layers
    layer_types"""
)
# Of architectures with experts. transformers does not look at use_qk_norm, which Qwen3-Coder has.
_EXPERTS_FIELDS = _words(
    """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers output_router_logits router_aux_loss_coef use_qk_norm"""
)
# Names, token ids, and what only training, generation or an implementation looks at.
_HARMLESS_FIELDS = _words(
    """model_type transformers_version _name_or_path name_or_path _commit_hash auto_map
    tokenizer_class task_specific_params id2label label2id num_labels problem_type finetuning_task
    transformers.js_config is_llama_config unsloth_version unsloth_fixed
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
    max_sequence_length model_max_length gradient_checkpointing
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    num_return_sequences
    use_cache pretraining_tp return_dict is_decoder output_hidden_states output_attentions
    attn_implementation _attn_implementation _attn_implementation_autoset"""
)
_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": _words("factor"),
    "dynamic": _words("factor original_max_position_embeddings"),
    "llama3": _words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _words(
        """factor original_max_position_embeddings attention_factor mscale mscale_all_dim
        beta_fast beta_slow truncate"""
    ),
}
# Far from what models have, and from what is laid out for them in vain.
_LARGEST_COUNT = 2**31 - 1
_LARGEST_COUNTS = {"num_hidden_layers": 10_000, "max_position_embeddings": 1 << 24}
_LARGEST = 1e30
_SHARED_ROPE_FIELDS = _words("rope_type type rope_theta partial_rotary_factor")
_REQUIRED_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises ModelNotFoundError without the file, CheckpointError where it is broken or contradicts
    itself, UnsupportedModelError where it asks for what minisgl does not compute.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    fields = _Fields(read_json(path), CONFIG_FILE)
    name = _architecture_name(fields)
    architecture = _ARCHITECTURES[name]
    known = _READ_FIELDS | _HARMLESS_FIELDS | architecture.optional_biases
    _refuse_unread(fields, known | _EXPERTS_FIELDS if architecture.experts else known)
    if (activation := fields.values.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; allowed: silu")

    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    head_dim = fields.count("head_dim", architecture.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{CONFIG_FILE}: {num_heads} heads, {num_kv_heads} KV heads and head_dim {head_dim} do "
            "not fit: heads must divide into KV heads and head_dim must be even."
        )
    biases = {name for name in architecture.optional_biases if fields.flag(name, False)}
    max_position = fields.count("max_position_embeddings")
    rope = _read_rope(fields, max_position)
    window = _active_window(fields, architecture)
    max_seq_len, reason = _limit(max_position, rope, window)
    notes: tuple[str, ...] = ()
    if max_seq_len < max_position:
        notes = (f"longest sequence {max_seq_len} instead of {max_position}: {reason}",)
    return ModelConfig(
        architecture=name,
        dtype=_checkpoint_dtype(fields),
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=architecture.qkv_bias or "attention_bias" in biases,
        o_bias="attention_bias" in biases,
        mlp_bias="mlp_bias" in biases,
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_seq_len=max_seq_len,
        max_seq_len_reason=reason,
        notes=notes,
        experts=_read_experts(fields) if architecture.experts else None,
    )


def _read_experts(fields: _Fields) -> ExpertsConfig:
    # transformers 4 and 5 name the number differently.
    name = "num_local_experts" if fields.values.get("num_local_experts") else "num_experts"
    num_experts, num_chosen = fields.count(name), fields.count("num_experts_per_tok")
    if num_chosen > num_experts:
        raise CheckpointError(
            f"{CONFIG_FILE}: num_experts_per_tok {num_chosen} is more than {name} {num_experts}."
        )
    dense = frozenset(fields.whole_numbers("mlp_only_layers"))
    step = fields.count("decoder_sparse_step", 1)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        size=fields.count("moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", False),
        layers=frozenset(
            layer
            for layer in range(fields.count("num_hidden_layers"))
            if layer not in dense and (layer + 1) % step == 0
        ),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its lists are nested too deep.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return values


class _Fields:
    """Typed access to a JSON object. null is as good as absent, a wrong type a CheckpointError."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def count(self, name: str, default: int | None = None) -> int:
        most = _LARGEST_COUNTS.get(name, _LARGEST_COUNT)
        value = self._get(name, default)
        # NaN is in no range.
        if not _is_number(value) or not 1 <= value <= most or value != int(value):
            raise self.wrong(name, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not _is_number(value) or not (value == 0 or 1 / _LARGEST <= abs(value) <= _LARGEST):
            raise self.wrong(name, f"0 or a number from {1 / _LARGEST:g} to {_LARGEST:g}")
        return float(value)

    def number_above(self, low: float, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= low:
            raise self.wrong(name, f"a number above {low:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole_numbers(self, name: str) -> list[int]:
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(number) is not int for number in value):
            raise self.wrong(name, "a list of whole numbers")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.where} lacks {name}.")
        return default if value is None else value

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        value = reprlib.repr(self.values.get(name))
        return CheckpointError(f"{self.where}: {name} is {value}, not {wanted}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _architecture_name(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else reprlib.repr(names)
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"Architecture {name} is not supported; {one_of(_ARCHITECTURES)}"
        )
    return name


def _refuse_unread(fields: _Fields, known: frozenset[str]) -> None:
    """Refuse any other field that is switched on: null, false, 0 and empty are not."""
    for name, value in fields.values.items():
        if name == "partial_rotary_factor" and value not in (None, 1):
            raise UnsupportedModelError(f"{fields.where}: {name} {value!r} is not supported.")
        if value and name not in known:
            raise UnsupportedModelError(
                f"{fields.where}: the field {name} ({reprlib.repr(value)}) is not supported."
            )


def _checkpoint_dtype(fields: _Fields) -> str:
    # A config without the field is one of float32's time.
    value = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: dtype {name} is not supported; {one_of(DTYPES)}"
        )
    return name


def _active_window(fields: _Fields, architecture: _Architecture) -> int | None:
    """Tokens that a layer with a sliding window sees; None where no layer has one."""
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(
        kind not in ("full_attention", "sliding_attention") for kind in kinds
    ):
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: layer_types {reprlib.repr(kinds)} are not supported."
        )
    default = architecture.default_window
    if not fields.values.get("sliding_window", default):
        return None
    if architecture.window_switch:
        if not fields.flag("use_sliding_window", False):
            return None
        if architecture.window_everywhere:
            return fields.count("sliding_window", default)
        # transformers 4 wrote no layer_types.
        first_windowed = fields.number("max_window_layers", 28)
        by_index = first_windowed < fields.count("num_hidden_layers")
        if not ("sliding_attention" in kinds if kinds else by_index):
            return None
    return fields.count("sliding_window", default)


def _limit(max_position: int, rope: RopeConfig, window: int | None) -> tuple[int, str | None]:
    """The longest sequence, and why it cannot be longer (None: it can)."""
    limits: list[tuple[int, str]] = []
    if rope.type == "dynamic":
        reason = "with dynamic rope scaling keys already cached would be rotated with another base"
        limits.append((rope.original_max_position, reason))
    if window is not None:
        limits.append((window, f"attention past the sliding window of {window} is not supported"))
    if not limits:
        return max_position, None
    limit, reason = min(limits)
    return min(limit, max_position), reason


def _read_rope(fields: _Fields, max_position: int) -> RopeConfig:
    source = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(source) or {}
    where = f"{CONFIG_FILE}: {source}"
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is not a JSON object.")
    rope = _Fields(values, where)
    type_ = str(values.get("rope_type") or values.get("type") or "default")
    if type_ not in _ROPE_FIELDS:
        raise UnsupportedModelError(f"{where}: rope_type {type_}; {one_of(_ROPE_FIELDS)}")
    _refuse_unread(rope, _ROPE_FIELDS[type_] | _SHARED_ROPE_FIELDS)
    for name in _REQUIRED_ROPE_FIELDS.get(type_, ()):
        rope.number_above(0, name)

    # Given at the top level it wins, as in transformers.
    original = fields.count(
        "original_max_position_embeddings",
        rope.count("original_max_position_embeddings", max_position),
    )
    factor = rope.number_above(0, "factor", max_position / original)
    plain = RopeConfig()
    low_freq_factor = rope.number("low_freq_factor", plain.low_freq_factor)
    return RopeConfig(
        type=type_,
        # Its powers tell the pairs apart.
        theta=rope.number_above(1, "rope_theta", fields.number_above(1, "rope_theta", plain.theta)),
        factor=factor,
        original_max_position=original,
        low_freq_factor=low_freq_factor,
        high_freq_factor=rope.number_above(
            low_freq_factor, "high_freq_factor", plain.high_freq_factor
        ),
        beta_fast=_yarn_turns(rope, "beta_fast", plain.beta_fast),
        beta_slow=_yarn_turns(rope, "beta_slow", plain.beta_slow),
        truncate=rope.flag("truncate", plain.truncate),
        attention_factor=_yarn_attention_factor(rope, factor) if type_ == "yarn" else 1.0,
    )


def _yarn_turns(rope: _Fields, name: str, default: float) -> float:
    """0 is as good as absent."""
    return rope.number_above(0, name, default) if rope.values.get(name) else default


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    """What cos and sin are multiplied by (YaRN, arXiv 2309.00071, section 3.4)."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1)
