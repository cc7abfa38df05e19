"""The part of config.json that all supported families share.

Spellings of transformers 4 (rope_scaling, rope_theta, torch_dtype) and 5 (rope_parameters, dtype)
are read.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable

from minisgl.errors import CheckpointError, UnsupportedModelError, one_of
from minisgl.layers.experts import ExpertsConfig
from minisgl.models.config import NativeConfig, RopeConfig
from minisgl.models.config_reader import (
    CONFIG_FILE,
    HARMLESS_FIELDS,
    Fields,
    checkpoint_dtype,
    field_names,
)

# The fields that `read_decoder`, `read_quantization` and the functions for sliding windows take
# into account.
DECODER_FIELDS = HARMLESS_FIELDS | field_names(
    """architectures dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps tie_word_embeddings
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor sliding_window use_sliding_window max_window_layers
    layer_types is_causal quantization_config compression_config"""
)

_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "mrope": frozenset(),
    "linear": field_names("factor"),
    "dynamic": field_names("factor original_max_position_embeddings"),
    "llama3": field_names(
        "factor low_freq_factor high_freq_factor original_max_position_embeddings"
    ),
    "yarn": field_names(
        """factor original_max_position_embeddings attention_factor mscale mscale_all_dim
        beta_fast beta_slow truncate"""
    ),
}
Windows = tuple[int | None, ...]  # the sliding window of each layer in tokens; None: it has none

# Text has the same position in all dimensions of an image's, so mrope changes nothing.
_SHARED_ROPE_FIELDS = field_names(
    "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved"
)
_REQUIRED_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_decoder(
    fields: Fields,
    architecture: str,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool | None = None,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Windows | None = None,
    experts: ExpertsConfig | None = None,
    sinks: bool = False,
    rotary_share: float | None = None,
) -> NativeConfig:
    """The config of a decoder, given what its family adds.

    head_dim: the default; None: hidden_size / num_attention_heads. o_bias: None: equals qkv_bias.
    windows: None: no layer has one.
    rotary_share: the default of partial_rotary_factor; None: whole heads are rotated.

    Raises CheckpointError, UnsupportedModelError.
    """
    fields.require("hidden_act", (None, "silu", "swish"))
    fields.require("is_causal", (None, True), ": else tokens attend to later ones")
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    head_dim = fields.count("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{CONFIG_FILE}: {num_heads} heads, {num_kv_heads} KV heads and head_dim {head_dim} do "
            "not fit: heads must divide into KV heads and head_dim must be even."
        )
    if experts is not None and experts.num_chosen > experts.num_experts:
        raise CheckpointError(
            f"{CONFIG_FILE}: {experts.num_chosen} experts for each token are more than the "
            f"{experts.num_experts} that there are."
        )
    _layer_kinds(fields)
    max_position = fields.count("max_position_embeddings")
    rope = read_rope(fields, max_position)
    max_seq_len, reason = _limit(max_position, rope)
    notes: tuple[str, ...] = ()
    if max_seq_len < max_position:
        notes = (f"longest sequence {max_seq_len} instead of {max_position}: {reason}",)
    return NativeConfig(
        architecture=architecture,
        dtype=checkpoint_dtype(fields),
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=tuple(
            None if window is None or window >= max_position else window
            for window in windows or [None] * fields.count("num_hidden_layers")
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=qkv_bias if o_bias is None else o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_seq_len=max_seq_len,
        max_seq_len_reason=reason,
        notes=notes,
        experts=experts,
        sinks=sinks,
        rotary_dim=_rotary_dim(fields, head_dim, rotary_share),
    )


def windows_of_all(fields: Fields, default: int | None = None) -> Windows:
    """The windows where all layers have the same.

    default: the window of a config that does not mention it; null switches the window off.
    """
    has_one = bool(fields.values.get("sliding_window", default))
    window = fields.count("sliding_window", default) if has_one else None
    return (window,) * fields.count("num_hidden_layers")


def switched_windows(fields: Fields, default: int) -> Windows:
    """The window of every layer if use_sliding_window is set, and none otherwise."""
    if fields.flag("use_sliding_window", False):
        return windows_of_all(fields, default)
    return (None,) * fields.count("num_hidden_layers")


def switched_windows_of_some(fields: Fields, default: int) -> Windows:
    """The same of the layers from max_window_layers on; the others see all."""
    # transformers 4 wrote no layer_types
    num_full = fields.number("max_window_layers", 28)
    return windows_of_kinds(
        fields, switched_windows(fields, default), lambda layer: layer >= num_full
    )


def windows_of_kinds(
    fields: Fields, windows: Windows, is_sliding: Callable[[int], bool]
) -> Windows:
    """`windows` of the layers that have one by layer_types, or without it by `is_sliding`."""
    kinds = _layer_kinds(fields)
    sliding = [kind == "sliding_attention" for kind in kinds] or map(
        is_sliding, range(len(windows))
    )
    return tuple(
        window if slides else None for window, slides in zip(windows, sliding, strict=True)
    )


def sparse_layers(fields: Fields) -> frozenset[int]:
    """The layers that have experts, as the Qwen families give them."""
    dense = fields.whole_numbers("mlp_only_layers")
    step = fields.count("decoder_sparse_step", 1)
    layers = range(step - 1, fields.count("num_hidden_layers"), step)
    return frozenset(layers).difference(dense)


def _layer_kinds(fields: Fields) -> list[str]:
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(
        kind not in ("full_attention", "sliding_attention") for kind in kinds
    ):
        raise UnsupportedModelError(
            f"{CONFIG_FILE}: layer_types {reprlib.repr(kinds)} are not supported."
        )
    if kinds and len(kinds) != fields.count("num_hidden_layers"):
        raise CheckpointError(
            f"{CONFIG_FILE}: layer_types has {len(kinds)} entries for "
            f"{fields.count('num_hidden_layers')} layers."
        )
    return kinds


def _limit(max_position: int, rope: RopeConfig) -> tuple[int, str | None]:
    """The longest sequence, and why the limit is hard (None: it may be exceeded)."""
    if rope.type != "dynamic":
        return max_position, None
    reason = "with dynamic rope scaling keys already cached would be rotated with another base"
    return min(rope.original_max_position, max_position), reason


def _rope_fields(fields: Fields) -> Fields:
    source = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(source) or {}
    where = f"{CONFIG_FILE}: {source}"
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is not a JSON object.")
    return Fields(values, where)


def _rotary_dim(fields: Fields, head_dim: int, default: float | None) -> int | None:
    """How many numbers of a head are rotated, the first; None: all."""
    name, rope = "partial_rotary_factor", _rope_fields(fields)
    # As in transformers, the field of the rope takes precedence.
    where = fields if rope.values.get(name) is None else rope
    share = where.number_above(0, name, default or 1.0)
    if default is None:
        if share != 1:
            raise UnsupportedModelError(f"{where.where}: {name} {share} is not supported.")
        return None
    if share > 1 or head_dim * share % 2:
        raise where.wrong(name, "a share of the head that is an even number")
    return int(head_dim * share)


def read_rope(fields: Fields, max_position: int) -> RopeConfig:
    """max_position: max_position_embeddings. Raises CheckpointError, UnsupportedModelError."""
    rope = _rope_fields(fields)
    type_ = str(rope.values.get("rope_type") or rope.values.get("type") or "default")
    if type_ not in _ROPE_FIELDS:
        raise UnsupportedModelError(f"{rope.where}: rope_type {type_}; {one_of(_ROPE_FIELDS)}")
    rope.refuse_others(_ROPE_FIELDS[type_] | _SHARED_ROPE_FIELDS)
    for name in _REQUIRED_ROPE_FIELDS.get(type_, ()):
        rope.number_above(0, name)
    # As in transformers, null stands for the ratio of both contexts, and nothing for no factor.
    if type_ == "yarn" and "factor" not in rope.values:
        raise CheckpointError(f"{rope.where} lacks factor, which the rope_type yarn needs.")

    # As in transformers, the field at the top level takes precedence.
    original = fields.count(
        "original_max_position_embeddings",
        rope.count("original_max_position_embeddings", max_position),
    )
    factor = rope.number_above(0, "factor", max_position / original)
    plain = RopeConfig()
    low_freq_factor = rope.number("low_freq_factor", plain.low_freq_factor)
    return RopeConfig(
        type="default" if type_ == "mrope" else type_,
        # With a base of 1 all pairs would rotate alike.
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


def _yarn_turns(rope: Fields, name: str, default: float) -> float:
    """0 counts as absent."""
    return rope.number_above(0, name, default) if rope.values.get(name) else default


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The factor of cos and sin (YaRN, arXiv 2309.00071, section 3.4)."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1)
