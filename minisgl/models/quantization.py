"""How a checkpoint's weights are quantised: what its config says, and what its tensors show.

The config names the arithmetic. Which linear maps are quantised follows from the tensors alone, so
that lists of exceptions need no interpretation; where both contradict each other, neither is
believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from minisgl.errors import CheckpointError, ConfigError, UnsupportedModelError
from minisgl.kernels.linear.quantized import ExpertMatrices, QuantizedProduct
from minisgl.kernels.moe.quantized_experts import QuantizedExperts
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models.config_reader import (
    CONFIG_FILE,
    Fields,
    field_names,
    quantization_fields,
    read_json,
    without_prefix,
)
from minisgl.models.formats import FORMATS, FP8_WHILE_LOADING, QuantizedFormat
from minisgl.models.formats.mixed import Mixed, alike
from minisgl.models.formats.quantized_format import OneFormat, Sign, StoredTensor

_MODELOPT, _COMPRESSED = "modelopt", "compressed-tensors"
# Files of ModelOpt, and of AutoGPTQ and AutoAWQ from before config.json had the field, and their
# methods.
_FILES = {
    "hf_quant_config.json": _MODELOPT,
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_READERS = {name: read for format in FORMATS for name, read in format.readers().items()}
_INSTEAD = (
    f"supported are {', '.join(format.offered for format in FORMATS)}, and --quantization fp8 with "
    "unquantised checkpoints"
)
_OF_EVERY = field_names("quant_method ignore ignored_layers modules_to_not_convert")
_MODELOPT_FIELDS = field_names(
    """quant_method quant_algo producer config_groups ignore exclude_modules kv_cache_scheme
    kv_cache_quant_algo group_size"""
)
_MIXED = "MIXED_PRECISION"  # the quant_algo of a model whose layers have one each
_ONLY_LAYERS = "use a checkpoint that leaves all else alone"
_LAYER_FIELDS = field_names("quant_algo group_size")
_COMPRESSED_FIELDS = field_names(
    """format quantization_status config_groups kv_cache_scheme
    global_compression_ratio version transform_config sparsity_config provider"""
)
_GROUP_FIELDS = field_names("targets weights input_activations output_activations format")
_ARGUMENT_FIELDS = field_names(
    """num_bits type strategy symmetric dynamic group_size block_structure actorder observer
    observer_kwargs scale_dtype zp_dtype"""
)


def read_quantization(fields: Fields, folder: Path) -> QuantizedFormat | None:
    """The format of a checkpoint, given its config.json. None: it is not quantised.

    Raises CheckpointError where the config is broken, UnsupportedModelError, with what to use
    instead, for a format that minisgl does not compute.
    """
    found = _find(fields, folder)
    parts = (fields.values.get("quantization"), None if found is None else found.values)
    names = [set(part) for part in parts if isinstance(part, Mapping)]
    # MLX names no method.
    if any(each >= {"bits", "group_size"} and "quant_method" not in each for each in names):
        raise UnsupportedModelError(
            f"{fields.where}: the checkpoint is quantised for MLX, which runs on Apple's chips; "
            "use the original, or an FP8, AWQ or GPTQ copy of it."
        )
    if found is None:
        return None
    # ModelOpt names no method in a config.json.
    default = _MODELOPT if found.values.get("quant_algo") or found.values.get("producer") else None
    method = str(found.values.get("quant_method") or default)
    readers = {**_READERS, _MODELOPT: _read_modelopt, _COMPRESSED: _read_compressed}
    if method not in readers or " " in method:  # that of a part of a method
        raise found.refused("quant_method", _INSTEAD)
    rest = {name: value for name, value in found.values.items() if name not in _OF_EVERY}
    return readers[method](Fields(rest, found.where))


def with_option(scheme: QuantizedFormat | None, quantization: str | None) -> QuantizedFormat | None:
    """The scheme of a checkpoint under --quantization. Raises ConfigError."""
    if quantization is None:
        return scheme
    if scheme is None:
        return FP8_WHILE_LOADING
    if scheme.option != quantization:
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
    for name, method in _FILES.items():
        if (folder / name).is_file():
            return Fields({"quant_method": method} | read_json(folder / name), name)
    return None


def _read_modelopt(fields: Fields) -> QuantizedFormat:
    if isinstance(inner := fields.values.get("quantization"), dict):
        fields = Fields(inner, f"{fields.where}: quantization")
    scheme: QuantizedFormat
    if fields.values.get("quant_algo") == _MIXED:
        scheme = _read_mixed(fields)
    else:
        scheme = _read_algo(fields)
        fields.refuse_others(_MODELOPT_FIELDS)
    fields.require("kv_cache_quant_algo", (None, "FP8"))
    bits = {format.bits for format in scheme.signs.values()}
    groups = fields.part("config_groups")
    for name in groups.values:
        group = groups.part(name)
        for part in ("weights", "input_activations"):
            arguments = group.part(part)
            arguments.require("num_bits", (None, *sorted(bits)), ", as quant_algo says")
            arguments.require("type", (None, "float"), ", as quant_algo says")
    return scheme


def _read_algo(fields: Fields) -> OneFormat:
    """The format of a model, or of one of its layers."""
    read = _READERS.get(f"{_MODELOPT} {fields.values.get('quant_algo')}")
    if read is None:
        raise fields.refused("quant_algo", _INSTEAD)
    scheme = read(fields)
    fields.require("group_size", (None, scheme.group), ", as quant_algo says")
    return scheme


def _read_mixed(fields: Fields) -> QuantizedFormat:
    """The formats of a model whose layers have one each, or none."""
    fields.refuse_others(_MODELOPT_FIELDS | {"quantized_layers"})
    layers = fields.part("quantized_layers")
    of_maps: dict[str, OneFormat] = {}
    for name in layers.values:
        layer = layers.part(name)
        if layer.values.get("quant_algo") is None:
            continue
        layer.refuse_others(_LAYER_FIELDS)
        path = without_prefix(name)
        if path == "embed_tokens":
            raise layer.refused("quant_algo", _ONLY_LAYERS)
        of_maps[path] = _read_algo(layer)
    if not of_maps:
        raise CheckpointError(f"{layers.where} names no layer and its quant_algo.")
    formats = tuple(dict.fromkeys(of_maps.values()))
    if (both := alike(formats)) is not None:
        raise UnsupportedModelError(
            f"{layers.where}: {both[0]} and {both[1]} in one model are not supported; use a "
            "checkpoint with one of them."
        )
    return formats[0] if len(formats) == 1 else Mixed(named_maps=of_maps)


def _read_compressed(fields: Fields) -> QuantizedFormat | None:
    if fields.values.get("transform_config"):
        raise fields.refused("transform_config", "use a checkpoint without transforms")
    sparsity = fields.values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise fields.refused("sparsity_config", "use a checkpoint that is only quantised")
    fields.refuse_others(_COMPRESSED_FIELDS)
    fields.require("quantization_status", (None, "compressed", "frozen"))
    groups = fields.values.get("config_groups")
    if not groups and fields.values.get("kv_cache_scheme"):
        return None  # only the KV cache is quantised
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{fields.where}: config_groups is empty or no JSON object.")
    schemes: dict[QuantizedFormat, str] = {}
    for name in groups:
        group = Fields(groups, fields.where).part(name)
        schemes.setdefault(_read_group(group, fields), name)
    if len(schemes) > 1:
        described = ", ".join(f"{name} is {scheme}" for scheme, name in schemes.items())
        raise UnsupportedModelError(
            f"{fields.where}: several schemes in one model are not supported ({described}); use a "
            "checkpoint whose layers are all quantised alike."
        )
    [scheme] = schemes
    return scheme


def _read_group(group: Fields, fields: Fields) -> QuantizedFormat:
    group.refuse_others(_GROUP_FIELDS)
    of_format = group if group.values.get("format") else fields
    known = [name.removeprefix(_COMPRESSED).strip() for name in _READERS if _COMPRESSED in name]
    of_format.require("format", known)
    if group.values.get("output_activations"):
        raise group.refused("output_activations", "use a checkpoint that leaves outputs alone")
    for part in ("weights", "input_activations"):
        group.part(part).refuse_others(_ARGUMENT_FIELDS)
    group.part("weights").require("dynamic", (None, False))
    return _READERS[f"{_COMPRESSED} {of_format.values['format']}"](group)


# -- tensors --------------------------------------------------------------------------------------


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
    stored: Mapping[str, StoredTensor],
    scheme: QuantizedFormat | None,
    folder: Path,
    head: str | None = None,
) -> dict[str, Sign]:
    """The linear maps that are quantised, without 'model.', and what shows it, as the tensors in
    `folder` say.

    Raises CheckpointError where the config says otherwise, UnsupportedModelError where something
    but layers and `head` is quantised.
    """
    found: dict[str, Sign] = {}
    signs = {format.sign for format in FORMATS}
    wanted = () if scheme is None else tuple(scheme.signs)
    for name, tensor in stored.items():
        path, _, kind = name.rpartition(".")
        sign = (kind, tensor.dtype)
        if sign not in signs:
            continue
        if sign not in wanted:
            says = f"says {scheme}" if wanted else "says nothing about quantisation"
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is {tensor.dtype}, but {CONFIG_FILE} {says}."
            )
        if not path.startswith("layers.") and path != head:
            raise UnsupportedModelError(
                f"{tensor.file}: {tensor.name} is quantised, which is supported of the linear maps "
                f"{'of layers' if head is None else 'of layers and of the head'}; {_ONLY_LAYERS}."
            )
        found[path] = sign
    if wanted and not found:
        lacking = " or ".join(f"{kind} of dtype {dtype}" for kind, dtype in wanted)
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} says {scheme}, but there is no tensor {lacking}: the weights "
            "are not quantised, or in another format."
        )
    return found


def quantized_weights(module: nn.Module) -> list[tuple[ExpertMatrices, int]]:
    """The quantised matrices of a layer, and the number of inputs of each whole one."""
    product = getattr(module, "product", None)
    if isinstance(module, Linear) and isinstance(product, QuantizedProduct):
        return [(product.weight, module.inputs.whole)]
    if isinstance(module, FusedExperts) and isinstance(product, QuantizedExperts):
        return [(product.gate_up, module.hidden.whole), (product.down, module.inner.whole)]
    return []
