"""How a checkpoint's weights are quantised: what its config says, and what its tensors show.

The config names the arithmetic. Which linear maps are quantised follows from the tensors alone, so
that lists of exceptions need no interpretation; where both contradict each other, neither is
believed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minisgl.config import BLOCK, FP8_WHILE_LOADING, Activations, QuantScheme, Storage
from minisgl.errors import CheckpointError, ConfigError, UnsupportedModelError, one_of
from minisgl.models.config_reader import (
    CONFIG_FILE,
    Fields,
    field_names,
    quantization_fields,
    read_json,
)

_MODELOPT, MODELOPT_FILE = "modelopt", "hf_quant_config.json"
# Files of AutoGPTQ and AutoAWQ, from before config.json had the field, and their methods.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_GROUP_SIZES = (32, 64, 128)
_INSTEAD = (
    "supported are FP8 (quant_method fp8, fbgemm_fp8 or compressed-tensors, ModelOpt) and INT4 "
    "(compressed-tensors pack-quantized, AWQ, GPTQ, AutoRound) checkpoints, and --quantization fp8 "
    "with unquantised ones; MXFP4 of gpt-oss"
)

_COMMON = "quant_method ignore ignored_layers modules_to_not_convert"
_FP8_FIELDS = field_names(
    f"{_COMMON} activation_scheme fmt scale_fmt weight_block_size dequantize kv_cache_scheme"
)
_FBGEMM_FIELDS = field_names(f"{_COMMON} activation_scale_ub")
_MODELOPT_FIELDS = field_names(
    """quant_method quant_algo producer config_groups ignore exclude_modules kv_cache_scheme
    kv_cache_quant_algo"""
)
_MXFP4_FIELDS = field_names(f"{_COMMON} dequantize")
_AWQ_FIELDS = field_names(
    f"""{_COMMON} bits w_bit group_size q_group_size zero_point version backend
    do_fuse modules_to_fuse fuse_max_seq_len exllama_config
    sym desc_act dynamic lm_head method format checkpoint_format pack_dtype pack_impl meta"""
)
_AUTO_ROUND_FIELDS = field_names(
    f"""{_COMMON} bits group_size sym data_type packing_format extra_config autoround_version
    backend act_bits act_group_size act_sym act_dynamic act_data_type super_bits super_group_size
    iters lr minmax_lr nsamples seqlen batch_size low_gpu_mem_usage enable_quanted_input
    enable_minmax_tuning enable_norm_bias_tuning gradient_accumulate_steps amp scale_dtype dataset
    damp_percent desc_act dynamic lm_head quant_block_list to_quant_block_names
    block_name_to_quantize export_to_format supported_types static_kv_dtype static_attention_dtype
    rotation_config provider"""
)
_GPTQ_FIELDS = field_names(
    f"""{_COMMON} bits group_size sym desc_act dynamic lm_head checkpoint_format format
    method pack_dtype pack_impl damp_percent damp_auto_increment static_groups true_sequential mse
    act_group_aware hyb_act model_name_or_path model_file_base_name model_seqlen meta quantizer
    dataset tokenizer batch_size block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize cache_block_outputs pad_token_id max_input_length use_cuda_fp16
    backend use_exllama disable_exllama exllama_config cache_examples_on_gpu is_marlin_format"""
)
_COMPRESSED_FIELDS = field_names(
    f"""{_COMMON} format quantization_status config_groups kv_cache_scheme
    global_compression_ratio version transform_config sparsity_config"""
)
_GROUP_FIELDS = field_names("targets weights input_activations output_activations format")
_ARGUMENT_FIELDS = field_names(
    """num_bits type strategy symmetric dynamic group_size block_structure actorder observer
    observer_kwargs scale_dtype zp_dtype"""
)
_ROWS = QuantScheme(bits=8, storage=Storage.FP8, strategy="channel", activations=Activations.TOKEN)
_MODELOPT_SCHEMES = {
    "FP8": QuantScheme(
        bits=8, storage=Storage.FP8, strategy="tensor", activations=Activations.STATIC
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": _ROWS,
}
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized")


def read_quantization(fields: Fields, folder: Path) -> QuantScheme | None:
    """The scheme of a checkpoint, given its config.json. None: it is not quantised.

    Raises CheckpointError where the config is broken, UnsupportedModelError, with what to use
    instead, for a scheme that minisgl does not compute.
    """
    found = _find(fields, folder)
    parts = (fields.values.get("quantization"), None if found is None else found.values)
    if any(map(_is_of_mlx, parts)):
        raise UnsupportedModelError(
            f"{fields.where}: the checkpoint is quantised for MLX, which runs on Apple's chips; "
            "use the original, or an FP8, AWQ or GPTQ copy of it."
        )
    if found is None:
        return None
    # ModelOpt names no method in a config.json.
    default = _MODELOPT if found.values.get("quant_algo") or found.values.get("producer") else None
    reader = _READERS.get(str(found.values.get("quant_method") or default))
    if reader is None:
        raise _refused(found, "quant_method")
    return reader(found)


def _is_of_mlx(part: object) -> bool:
    """MLX names no method."""
    return (
        isinstance(part, Mapping)
        and part.keys() >= {"bits", "group_size"}
        and "quant_method" not in part
    )


def with_option(scheme: QuantScheme | None, quantization: str | None) -> QuantScheme | None:
    """The scheme of a checkpoint under --quantization. Raises ConfigError."""
    if quantization is None:
        return scheme
    if scheme is None:
        return FP8_WHILE_LOADING
    if scheme.bits != 8:
        raise ConfigError(
            "--quantization",
            quantization,
            f"the checkpoint is quantised already: {scheme}. Leave the option out, or choose an "
            "unquantised checkpoint",
        )
    return scheme


def _find(fields: Fields, folder: Path) -> Fields | None:
    found = quantization_fields(fields.values)
    if found is not None:
        return found
    if (folder / MODELOPT_FILE).is_file():
        values = {"quant_method": _MODELOPT} | read_json(folder / MODELOPT_FILE)
        return Fields(values, MODELOPT_FILE)
    for name, method in _OLD_FILES.items():
        if (folder / name).is_file():
            return Fields({"quant_method": method} | read_json(folder / name), name)
    return None


def _refused(fields: Fields, name: str, allowed: str = _INSTEAD) -> UnsupportedModelError:
    value = reprlib.repr(fields.values.get(name))
    return UnsupportedModelError(f"{fields.where}: {name} {value} is not supported; {allowed}.")


def _require(fields: Fields, name: str, values: Collection[object], instead: str = "") -> None:
    """Raise UnsupportedModelError where a field has another value."""
    value = fields.values.get(name)
    # 1 equals True to Python.
    if not any(value == known and type(value) is type(known) for known in values):
        allowed = one_of([known for known in values if known is not None])
        raise _refused(fields, name, allowed + instead)


# -- quant_method fp8 -----------------------------------------------------------------------------


def _read_fp8(fields: Fields) -> QuantScheme:
    fields.refuse_others(_FP8_FIELDS)
    _require(fields, "fmt", (None, "e4m3", "float8_e4m3fn"))
    # Scales that are powers of two: those of weights are, and for inputs others are as good.
    _require(fields, "scale_fmt", (None, "ue8m0"))
    _require(fields, "activation_scheme", ("dynamic", "static"))
    _require(fields, "dequantize", (None, False))
    static = fields.values["activation_scheme"] == "static"
    if fields.values.get("weight_block_size") is None:
        return QuantScheme(
            bits=8,
            storage=Storage.FP8,
            strategy="tensor",
            # Not one scale for all rows of a step: that would make rows depend on each other.
            activations=Activations.STATIC if static else Activations.TOKEN,
        )
    _require(fields, "weight_block_size", ([BLOCK, BLOCK],))
    if static:
        raise _refused(fields, "activation_scheme", "with weight_block_size only dynamic is")
    return QuantScheme(bits=8, storage=Storage.FP8, strategy="block", activations=Activations.GROUP)


# -- FBGEMM and ModelOpt --------------------------------------------------------------------------


def _read_fbgemm(fields: Fields) -> QuantScheme:
    """activation_scale_ub, which cuts inputs off that are too large for it, is left aside: here
    the scale of a row follows its largest input."""
    fields.refuse_others(_FBGEMM_FIELDS)
    return _ROWS


def _read_modelopt(fields: Fields) -> QuantScheme:
    if isinstance(inner := fields.values.get("quantization"), dict):
        fields = Fields(inner, f"{fields.where}: quantization")
    scheme = _MODELOPT_SCHEMES.get(str(fields.values.get("quant_algo")))
    if scheme is None:
        raise _refused(fields, "quant_algo")
    fields.refuse_others(_MODELOPT_FIELDS)
    _require(fields, "kv_cache_quant_algo", (None, "FP8"))
    groups = fields.values.get("config_groups") or {}
    for name, values in _object(groups, f"{fields.where}: config_groups").items():
        group = _object(values, f"{fields.where}: {name}")
        for part in ("weights", "input_activations"):
            where = f"{fields.where}: {name}: {part}"
            arguments = Fields(_object(group.get(part) or {}, where), where)
            _require(arguments, "num_bits", (None, 8), ", as quant_algo says")
            _require(arguments, "type", (None, "float"), ", as quant_algo says")
    return scheme


# -- quant_method mxfp4 ---------------------------------------------------------------------------


def _read_mxfp4(fields: Fields) -> QuantScheme:
    fields.refuse_others(_MXFP4_FIELDS)
    _require(fields, "dequantize", (None, False))
    return QuantScheme(bits=4, storage=Storage.MXFP4, strategy="group", group_size=32)


# -- AWQ and GPTQ ---------------------------------------------------------------------------------


def _read_awq(fields: Fields) -> QuantScheme:
    fields.refuse_others(_AWQ_FIELDS)
    _refuse_exceptions(fields)
    _require(fields, "zero_point", (True,), ", which AutoAWQ's default is")
    version = fields.values.get("version")
    if str(version or "gemm").lower() != "gemm":
        raise _refused(fields, "version", "use the checkpoint of version gemm")
    # GPTQModel writes AWQ, too, with fields of its own.
    _require(fields, "desc_act", (None, False))
    _require(fields, "pack_dtype", (None, "int32"))
    for name in ("checkpoint_format", "format"):
        _require(fields, name, (None, "gemm"))
    return QuantScheme(
        bits=_int4_bits(fields, "bits", "w_bit"),
        storage=Storage.AWQ,
        strategy="group",
        group_size=_group_size(fields, "group_size", "q_group_size"),
        symmetric=False,
    )


def _read_gptq(fields: Fields) -> QuantScheme:
    fields.refuse_others(_GPTQ_FIELDS)
    _require(fields, "desc_act", (None, False), ": use the model quantised without it, or as AWQ")
    _refuse_exceptions(fields)
    if fields.values.get("is_marlin_format"):
        raise _refused(fields, "is_marlin_format", "use the checkpoint of format gptq")
    _require(fields, "sym", (True,), ": use a symmetric checkpoint, or one quantised as AWQ")
    _require(fields, "pack_dtype", (None, "int32"))
    name = "checkpoint_format" if fields.values.get("checkpoint_format") else "format"
    _require(fields, name, (None, "gptq", "gptq_v2"))
    return QuantScheme(
        bits=_int4_bits(fields, "bits"),
        storage=Storage.GPTQ_V2 if fields.values.get(name) == "gptq_v2" else Storage.GPTQ,
        strategy="group",
        group_size=_group_size(fields, "group_size"),
    )


def _read_auto_round(fields: Fields) -> QuantScheme:
    """AutoRound packs as GPTQ, or as AWQ; packing_format says which."""
    fields.refuse_others(_AUTO_ROUND_FIELDS)
    _require(fields, "data_type", (None, "int"), ": use an INT4 or FP8 checkpoint")
    _require(fields, "desc_act", (None, False))
    for name in ("act_bits", "super_bits", "rotation_config"):
        if fields.values.get(name) not in (None, 0, 16, 32, {}):
            raise _refused(fields, name, "use a checkpoint of which only the weights are quantised")
    _refuse_exceptions(fields)
    others = fields.values.get("extra_config")
    for values in _object(others or {}, f"{fields.where}: extra_config").values():
        # Layers that are not quantised show in the tensors.
        if not isinstance(values, dict) or values.get("bits") not in (16, 32):
            raise _refused(
                fields, "extra_config", "use a checkpoint whose layers are all quantised alike"
            )
    name = "packing_format"
    packing = str(fields.values.get(name) or "auto_round:auto_gptq").removeprefix("auto_round:")
    bits, group_size = _int4_bits(fields, "bits"), _group_size(fields, "group_size")
    if packing in ("auto_awq", "awq"):
        return QuantScheme(
            bits=bits,
            storage=Storage.AWQ,
            strategy="group",
            group_size=group_size,
            symmetric=False,  # the zero points are stored all the same
        )
    if packing not in ("auto_gptq", "gptq"):
        raise _refused(fields, name, "allowed: auto_round:auto_gptq or auto_round:auto_awq")
    _require(fields, "sym", (True,), ": use a symmetric checkpoint, or one packed as AWQ")
    return QuantScheme(bits=bits, storage=Storage.GPTQ, strategy="group", group_size=group_size)


def _refuse_exceptions(fields: Fields) -> None:
    """Refuse layers quantised otherwise than the rest, and a quantised lm_head."""
    if fields.values.get("dynamic"):
        raise _refused(fields, "dynamic", "use a checkpoint whose layers are all quantised alike")
    if fields.values.get("lm_head"):
        raise _refused(fields, "lm_head", "use a checkpoint whose lm_head is not quantised")


def _int4_bits(fields: Fields, *names: str) -> int:
    name = next((name for name in names if name in fields.values), names[0])
    _require(fields, name, (4,), " for integers: use a 4-bit checkpoint, or an FP8 one")
    return 4


def _group_size(fields: Fields, *names: str) -> int:
    name = next((name for name in names if name in fields.values), names[0])
    _require(fields, name, _GROUP_SIZES)
    return fields.count(name)


# -- compressed-tensors ---------------------------------------------------------------------------


def _read_compressed(fields: Fields) -> QuantScheme | None:
    if fields.values.get("transform_config"):
        raise _refused(fields, "transform_config", "use a checkpoint without transforms")
    sparsity = fields.values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refused(fields, "sparsity_config", "use a checkpoint that is only quantised")
    fields.refuse_others(_COMPRESSED_FIELDS)
    _require(fields, "quantization_status", (None, "compressed", "frozen"))
    groups = fields.values.get("config_groups")
    if not groups and fields.values.get("kv_cache_scheme"):
        return None  # only the KV cache is quantised
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{fields.where}: config_groups is empty or no JSON object.")
    schemes: dict[QuantScheme, str] = {}
    for name, values in groups.items():
        where = f"{fields.where}: {name}"
        group = Fields(_object(values, where), where)
        schemes.setdefault(_read_group(group, fields), name)
    if len(schemes) > 1:
        described = ", ".join(f"{name} is {scheme}" for scheme, name in schemes.items())
        raise UnsupportedModelError(
            f"{fields.where}: several schemes in one model are not supported ({described}); use a "
            "checkpoint whose layers are all quantised alike."
        )
    [scheme] = schemes
    return scheme


def _read_group(group: Fields, fields: Fields) -> QuantScheme:
    group.refuse_others(_GROUP_FIELDS)
    _require(group if group.values.get("format") else fields, "format", _COMPRESSED_FORMATS)
    if group.values.get("output_activations"):
        raise _refused(group, "output_activations", "use a checkpoint that leaves outputs alone")
    where = f"{group.where}: weights"
    weights = Fields(_object(group.values.get("weights"), where), where)
    weights.refuse_others(_ARGUMENT_FIELDS)
    _require(weights, "dynamic", (None, False))
    values = group.values.get("input_activations")
    inputs: Fields | None = None
    if values:
        where = f"{group.where}: input_activations"
        inputs = Fields(_object(values, where), where)
        inputs.refuse_others(_ARGUMENT_FIELDS)
    if weights.values.get("type") == "int":
        return _read_int4(weights, inputs)
    _require(weights, "type", ("float", "int"))
    return _read_float8(weights, inputs)


def _read_int4(weights: Fields, inputs: Fields | None) -> QuantScheme:
    if inputs is not None:
        raise _refused(inputs, "type", "with INT4 weights inputs are not quantised")
    _require(weights, "actorder", (None, False, "static", "weight"), ": not by group")
    _require(weights, "strategy", ("group",))
    return QuantScheme(
        bits=_int4_bits(weights, "num_bits"),
        storage=Storage.COMPRESSED,
        strategy="group",
        group_size=_group_size(weights, "group_size"),
        symmetric=weights.flag("symmetric", True),
    )


def _read_float8(weights: Fields, inputs: Fields | None) -> QuantScheme:
    for part in (weights, inputs):
        if part is not None:
            _require(part, "num_bits", (8,), ": use an FP8 or INT4 checkpoint")
            _require(part, "type", ("float",))
            _require(part, "symmetric", (None, True))
    _require(weights, "strategy", ("tensor", "channel", "block"))
    strategy = str(weights.values["strategy"])
    if strategy == "block":
        _require(weights, "block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"))
    return QuantScheme(
        bits=8,
        storage=Storage.COMPRESSED,
        strategy=strategy,
        activations=_read_activations(inputs, strategy),
    )


def _read_activations(inputs: Fields | None, strategy: str) -> Activations:
    if inputs is None:
        return Activations.NONE
    _require(inputs, "dynamic", (None, False, True))
    dynamic = inputs.flag("dynamic", False)
    if strategy == "block":
        _require(inputs, "strategy", ("group",))
        _require(inputs, "group_size", (BLOCK,))
        _require(inputs, "dynamic", (True,))
        return Activations.GROUP
    if dynamic:
        _require(inputs, "strategy", ("token", "tensor"))
        return Activations.TOKEN  # one scale for all rows would make them depend on each other
    _require(inputs, "strategy", ("tensor",))
    return Activations.STATIC


def _object(values: object, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is not a JSON object.")
    return values


_READERS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    _MODELOPT: _read_modelopt,
    "mxfp4": _read_mxfp4,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "compressed-tensors": _read_compressed,
}


# -- tensors --------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    name: str
    dtype: str  # as safetensors names it
    file: Path


# The tensor that shows that a linear map is quantised, and its dtype; of MXFP4, one that shows that
# the experts are.
_SIGNS = {
    Storage.FP8: ("weight", "F8_E4M3"),
    Storage.COMPRESSED: ("weight_packed", "I32"),
    Storage.AWQ: ("qweight", "I32"),
    Storage.MXFP4: ("gate_up_proj_blocks", "U8"),
}


_TO_GATES = (
    *(".mlp.gate", ".mlp.router", ".mlp.shared_expert_gate", ".router.proj"),
    *(".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".linear_attn.in_proj_ba"),
)
_BY_HEAD = ".self_attn.kv_b_proj"  # multiplied in parts, in the dtype of the model


def are_experts(name: str) -> bool:
    """Whether a module is the experts of a layer: those that MXFP4 quantises all at once."""
    return name.startswith("layers.") and name.endswith(".experts")


def is_quantizable(name: str) -> bool:
    """Whether a linear map, by its name without 'model.', is one of a layer's that its product
    computes with as it is stored; neither a router nor one to a few gates."""
    return name.startswith("layers.") and not name.endswith((*_TO_GATES, _BY_HEAD))


def quantized_maps(
    stored: Mapping[str, StoredTensor], scheme: QuantScheme | None, folder: Path
) -> frozenset[str]:
    """The linear maps that are quantised, without 'model.', as the tensors in `folder` show.

    Raises CheckpointError where the config says otherwise, UnsupportedModelError where something
    outside of the layers is quantised.
    """
    found: set[str] = set()
    wanted = None if scheme is None else _sign(scheme)
    for name, tensor in stored.items():
        path, _, kind = name.rpartition(".")
        sign = (kind, tensor.dtype)
        if sign not in _SIGNS.values():
            continue
        if sign != wanted:
            says = f"{CONFIG_FILE} says nothing about quantisation"
            if scheme is not None:
                says = f"{CONFIG_FILE} says {scheme}"
                if scheme.storage == Storage.FLOAT:
                    says = "its config says nothing about quantisation"
            raise CheckpointError(f"{tensor.file}: {tensor.name} is {tensor.dtype}, but {says}.")
        if not path.startswith("layers."):
            raise UnsupportedModelError(
                f"{tensor.file}: {tensor.name} is quantised, which is not supported outside of "
                "the layers; use a checkpoint that leaves lm_head and embedding alone."
            )
        found.add(path)
    if wanted is not None and not found:
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} says {scheme}, but there is no tensor {wanted[0]} of dtype "
            f"{wanted[1]}: the weights are not quantised, or in another format."
        )
    return frozenset(found)


def _sign(scheme: QuantScheme) -> tuple[str, str] | None:
    if scheme.storage == Storage.FLOAT:
        return None
    if scheme.storage == Storage.MXFP4:
        return _SIGNS[Storage.MXFP4]
    if scheme.bits == 8:
        return _SIGNS[Storage.FP8]
    compressed = scheme.storage == Storage.COMPRESSED
    return _SIGNS[Storage.COMPRESSED if compressed else Storage.AWQ]


def scale_dtype(
    stored: Mapping[str, StoredTensor], maps: Collection[str], dtype: torch.dtype
) -> torch.dtype:
    """The dtype in which to keep the scales of INT4 weights, so that they lose nothing.

    dtype: the model's.
    """
    scales = (f"{map}.{kind}" for map in maps for kind in ("weight_scale", "scales"))
    names = {stored[name].dtype for name in scales if name in stored}
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16}
    if dtype == torch.float32 or len(names) != 1:
        return torch.float32
    return kinds.get(names.pop(), torch.float32)
