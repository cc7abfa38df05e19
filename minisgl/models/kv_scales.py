"""The scales of an FP8 KV cache that a checkpoint brings, under the names that exporters give them.

The value that attention reads is the stored one times its layer's scale (OCP 8-bit floating point
specification, 2023, for the format: e4m3).
"""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minisgl.config import UNSCALED, AttentionSpec, KVScales
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.models.config import ModelConfig
from minisgl.models.config_reader import (
    CONFIG_FILE,
    Fields,
    quantization_fields,
    read_json,
    without_prefix,
)
from minisgl.models.hub import SINGLE_FILE, read_index
from minisgl.models.target import FLOATS

# Without 'model.'. llm-compressor and ModelOpt write k_scale and v_scale, of the attention or of
# its projections; AutoFP8 and Quark output_scale; files of 2024 one kv_scale for both. A q_scale is
# for attention that rounds its queries, too, which minisgl does not.
_NAMES = re.compile(
    r"layers\.(?P<layer>\d+)\.self_attn\.(?:"
    r"(?:attn\.|qkv_proj\.)?(?P<plain>[qkv]|kv)_scale"
    r"|(?P<part>[kv])_proj\.(?:(?P=part)_scale|output_scale)"
    r"|q_proj\.(?:q_scale|output_scale))"
)
SMALLEST = 2.0**-126  # of the normal numbers of float32; below, its reciprocal overflows
_IGNORE = "--kv-cache-dtype model leaves the KV cache as it is"


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name, without 'model.', scales a KV cache or the queries over it."""
    return _NAMES.fullmatch(name) is not None


def with_kv_scales(config: ModelConfig, folder: Path) -> ModelConfig:
    """`config` with the KV scales among the weights in `folder`, if there are any.

    Raises CheckpointError where a scale is broken, missing or given twice, UnsupportedModelError
    for scales per head and for other formats than FP8.
    """
    _check_scheme(folder)
    found: dict[tuple[int, str], tuple[float, str]] = {}  # (layer, k or v): scale, tensor
    for file, names in _scales_by_file(folder).items():
        for name, layer, kinds, scale in _scales_in(file, names):
            if layer in range(config.num_layers, config.num_layers + config.num_drafting_layers):
                continue
            if layer >= config.num_layers:
                raise CheckpointError(
                    f"{file}: {name} is of a layer that the model does not have; it has "
                    f"{config.num_layers}."
                )
            for kind in kinds:
                other, its_name = found.setdefault((layer, kind), (scale, name))
                if other != scale:
                    raise CheckpointError(
                        f"{file}: {name} is {scale:g}, but {its_name} {other:g}: one contradicts "
                        "the other."
                    )
    if not found:
        return config
    attends = [isinstance(spec, AttentionSpec) for spec in config.facts().layers]
    for layer, kind in itertools.product(range(config.num_layers), "kv"):
        if attends[layer] and (layer, kind) not in found:
            raise CheckpointError(
                f"{folder} lacks layers.{layer}.self_attn.{kind}_scale, although it holds KV "
                f"scales of others, as {next(iter(found.values()))[1]}; {_IGNORE}."
            )
    scales = (
        KVScales(*(found[layer, kind][0] for kind in "kv")) if attends[layer] else UNSCALED
        for layer in range(config.num_layers)
    )
    return replace(config, kv_scales=tuple(scales))


def _scales_by_file(folder: Path) -> dict[Path, list[str] | None]:
    """The files that have scales, and the names of these. None: there is no index, and the file's
    header says what it has."""
    weight_map = read_index(folder)
    if weight_map is None:
        return {folder / SINGLE_FILE: None}
    found: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if _match(name):
            found.setdefault(folder / file, []).append(name)
    return {**found}


def _match(name: str) -> re.Match[str] | None:
    """What a name of a checkpoint says of a scale of keys, values or both."""
    if not name.endswith("_scale"):  # quick, for the many names of weights
        return None
    match = _NAMES.fullmatch(without_prefix(name))
    return match if match and (match["part"] or match["plain"] not in (None, "q")) else None


def _scales_in(file: Path, names: list[str] | None) -> list[tuple[str, int, str, float]]:
    """(name, layer, for k, v or both, scale) of each scale in a file, or of these; its other
    tensors are not read."""
    found: list[tuple[str, int, str, float]] = []
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys() if names is None else names:
                if match := _match(name):
                    scale = _scalar(opened.get_slice(name), name, file)
                    kinds = match["plain"] or match["part"]
                    found.append((name, int(match["layer"]), kinds, scale))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found


def _scalar(stored: Any, name: str, file: Path) -> float:
    """The number in a tensor of shape () or (1,)."""
    shape, dtype = stored.get_shape(), stored.get_dtype()
    if math.prod(shape) > 1:
        raise UnsupportedModelError(
            f"{file}: {name} has the shape {shape}: KV scales per head or channel are not "
            f"supported; allowed: one number a layer, of the shape [] or [1]. {_IGNORE}."
        )
    if shape not in ([], [1]) or dtype not in FLOATS:
        raise CheckpointError(
            f"{file}: {name} is {dtype} of the shape {shape}; expected {', '.join(FLOATS)} of the "
            "shape [] or [1]."
        )
    scale = float(stored[...])
    if not SMALLEST <= scale < math.inf:
        raise CheckpointError(
            f"{file}: {name} is {scale:g}; a KV scale must be above 0, a normal number of float32 "
            f"(from {SMALLEST:.3g} on) and finite. {_IGNORE}."
        )
    return scale


def _check_scheme(folder: Path) -> None:
    """Refuse what config.json says of a KV cache that is not e4m3 with one scale a layer."""
    quantization = quantization_fields(read_json(folder / CONFIG_FILE))
    scheme = None if quantization is None else quantization.values.get("kv_cache_scheme")
    # The names are those of AutoFP8 and of ModelOpt for e4m3 with scales in the files.
    if quantization is None or scheme in (None, "static", "FP8"):
        return
    where = f"{quantization.where}: kv_cache_scheme"
    if not isinstance(scheme, dict):
        raise CheckpointError(
            f"{where} is {reprlib.repr(scheme)}; expected a JSON object, or 'static'. {_IGNORE}."
        )
    fields = Fields(scheme, where)
    fields.require("num_bits", (8,), f". {_IGNORE}")
    fields.require("type", ("float",), f". {_IGNORE}")
    fields.require("strategy", (None, "tensor"), f". {_IGNORE}")
    fields.require("symmetric", (None, True), f". {_IGNORE}")
    fields.require("dynamic", (None, False), f". {_IGNORE}")
