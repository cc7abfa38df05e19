"""Small quantised checkpoints in every format, beside the same weights dequantised, and what
transformers computes from these.

The compressed-tensors package writes its own formats; the packers of the others are written from
their layouts alone, and share no code with the loader.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from safetensors.torch import load_file, save_file
from support.checkpoints import Spec, make_checkpoint
from support.mxfp4_checkpoints import NUMBERS
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Packed:
    """One quantised linear map."""

    tensors: Tensors  # by the last part of their names
    weight: Tensor  # [n, k] float32: what they stand for


@dataclass(frozen=True)
class Format:
    config: Mapping[str, Any]  # quantization_config
    pack: Callable[[Tensor], Packed]
    rounds: str | None = None  # how x is rounded: token, group, static, int8; None: not at all

    def of(self, path: str) -> Format:
        """That of a linear map."""
        return self

    def config_of(self, paths: Iterable[str]) -> dict[str, Any]:
        """quantization_config of a checkpoint in which these linear maps are quantised."""
        return dict(self.config)


@dataclass(frozen=True, kw_only=True)
class Mixture(Format):
    """Several, of ModelOpt. `config` and `pack` are of none of them."""

    algo: Callable[[str], str]  # the quant_algo of a linear map, by its name

    def of(self, path: str) -> Format:
        return FORMATS[{"FP8": "modelopt"}.get(self.algo(path), "nvfp4-modelopt")]

    def config_of(self, paths: Iterable[str]) -> dict[str, Any]:
        layers = {}
        for path in paths:
            algo = self.algo(path)
            group = {"group_size": 16} if "NVFP4" in algo else {}
            name = path.partition(".experts.")[0] + ".experts" if ".experts." in path else path
            layers[name] = {"quant_algo": algo, **group}
        return dict(self.config) | {"quantized_layers": layers}


def mixture(algo: Callable[[str], str]) -> Mixture:
    """As ModelOpt writes them."""
    config = {
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt", "version": "0.44.0"},
        "quant_method": "modelopt",
        "quantized_layers": {  # of another checkpoint
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    return Mixture(config, partial(pack_nvfp4, modelopt=True), "static", algo=algo)


# -- FP8 ------------------------------------------------------------------------------------------


def blocks_of(w: Tensor, size: int = 128) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The largest entry of each block, and a function that spreads a value of each over w."""
    n, k = w.shape
    rows, columns = torch.arange(n) // size, torch.arange(k) // size
    largest = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(largest.shape[0]):
        for j in range(largest.shape[1]):
            largest[i, j] = w[i * size : (i + 1) * size, j * size : (j + 1) * size].abs().max()
    return largest, lambda values: values[rows][:, columns]


def pack_fp8_block(w: Tensor, name: str = "weight_scale_inv") -> Packed:
    largest, spread = blocks_of(w)
    scale = (largest / 448).bfloat16()
    q = (w / spread(scale.float())).clamp(-448, 448).to(E4M3)
    return Packed({"weight": q, name: scale}, q.float() * spread(scale.float()))


def pack_fp8_tensor(w: Tensor, *, static: bool) -> Packed:
    scale = w.abs().max() / 448
    q = (w / scale).clamp(-448, 448).to(E4M3)
    tensors = {"weight": q, "weight_scale": scale}
    if static:
        tensors["input_scale"] = 0.02 + 0.01 * w[0, 0].abs()  # of every map another one
    return Packed(tensors, q.float() * scale)


def pack_as_transformers(w: Tensor, *, static: bool) -> Packed:
    """The same under the names that FP8Linear of transformers has."""
    packed = pack_fp8_tensor(w, static=static)
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = {names.get(name, name): tensor for name, tensor in packed.tensors.items()}
    return Packed(tensors, packed.weight)


def pack_fp8_rows(w: Tensor, *, flat: bool = False) -> Packed:
    scale = w.abs().amax(1, keepdim=True) / 448
    q = (w / scale).clamp(-448, 448).to(E4M3)
    stored = scale.squeeze(1) if flat else scale
    return Packed({"weight": q, "weight_scale": stored}, q.float() * scale)


# -- INT8 -----------------------------------------------------------------------------------------


def pack_int8(w: Tensor) -> Packed:
    scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = (w / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return Packed({"weight": q, "weight_scale": scale}, q.float() * scale.float())


def int8() -> Format:
    """As RedHat publishes them."""
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme("W8A8", ["Linear"])},
        format="int-quantized",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    return Format(config.model_dump(mode="json"), pack_int8, "int8")


# -- INT4 -----------------------------------------------------------------------------------------


def to_int4(
    w: Tensor, group: int, *, symmetric: bool, negative: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [n, k] and zero [n, k / group] from 0 to 15, scale [n, k / group] float16, and W. negative:
    the same W, with a scale below 0 of each second row."""
    groups = w.unflatten(1, (-1, group))
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).half()
        zero = torch.full(scale.shape, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15).long()
    steps = groups / scale.float()[..., None] + zero[..., None]
    q = steps.round().clamp(0, 15).long()
    dequantized = (q - zero[..., None]) * scale.float()[..., None]
    if negative:
        largest = 16 if symmetric else 15
        q[::2], zero[::2], scale[::2] = largest - q[::2], largest - zero[::2], -scale[::2]
    return q.flatten(1), zero, scale, dequantized.flatten(1)


def in_int32(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[m, 8 · n] from 0 to 15 → [m, n] int32, whose place j holds number order[j] of its eight."""
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, number in enumerate(order):
        packed |= numbers[:, number::8].long() << 4 * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def pack_awq(w: Tensor, group: int = 128, *, negative: bool = False) -> Packed:
    q, zero, scale, dequantized = to_int4(w, group, symmetric=False, negative=negative)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return Packed(
        {
            "qweight": in_int32(q.T, order),
            "qzeros": in_int32(zero.T, order),
            "scales": scale.T.contiguous(),
        },
        dequantized,
    )


def pack_gptq(w: Tensor, group: int = 128, *, v2: bool = False, negative: bool = False) -> Packed:
    q, zero, scale, dequantized = to_int4(w, group, symmetric=True, negative=negative)
    return Packed(
        {
            "qweight": in_int32(q).T.contiguous(),
            "qzeros": in_int32((zero if v2 else zero - 1).T),
            "scales": scale.T.contiguous(),
            "g_idx": (torch.arange(w.shape[1]) // group).int(),
        },
        dequantized,
    )


# -- NVFP4 ----------------------------------------------------------------------------------------


def pack_nvfp4(w: Tensor, *, modelopt: bool) -> Packed:
    """Two e2m1 numbers in a byte, the first in the lower bits; e4m3 scales of 16 of a row; and one
    number of the whole, by which ModelOpt's weights are multiplied, and the others' divided."""
    divisor = 6 * 448 / w.abs().max()
    whole = 1 / divisor
    groups = w.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
    steps = scale.float()[..., None] * whole
    codes = ((groups / steps)[..., None] - NUMBERS).abs().argmin(-1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    numbers = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    dequantized = (NUMBERS[codes] * scale.float()[..., None]).flatten(1) * whole
    if modelopt:
        tensors = {"weight": numbers, "weight_scale_2": whole, "input_scale": whole / 2}
    else:
        tensors = {"weight_packed": numbers, "weight_global_scale": divisor[None]}
        tensors["input_global_scale"] = divisor[None] * 2
    return Packed(tensors | {"weight_scale": scale}, dequantized)


def nvfp4() -> Format:
    """That of compressed-tensors, which rounds inputs, too."""
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme("NVFP4", ["Linear"])},
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    return Format(config.model_dump(mode="json"), partial(pack_nvfp4, modelopt=False))


# -- compressed-tensors ---------------------------------------------------------------------------


def compressed(
    preset: str, *, weights_alone: bool = False, negative: bool = False, **weights: Any
) -> Format:
    """weights_alone: inputs are not rounded. negative: as of to_int4."""
    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    if weights_alone:
        scheme = scheme.model_copy(update={"input_activations": None})
    scheme = scheme.model_copy(update={"weights": scheme.weights.model_copy(update=weights)})
    is_int4 = scheme.weights.num_bits == 4
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized" if is_int4 else "float-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    ).model_dump(mode="json")
    compressor = PackedQuantizationCompressor if is_int4 else FloatQuantizationCompressor
    inputs = scheme.input_activations
    rounds = None if inputs is None else {"token": "token", "group": "group", "tensor": "static"}
    static = inputs is not None and not inputs.dynamic

    def pack(w: Tensor) -> Packed:
        state = {"weight": w, **scales(w)}
        tensors: Tensors = compressor.compress(state, scheme)
        wide = {name: t.float() if "scale" in name else t for name, t in tensors.items()}
        dequantized = compressor.decompress(wide, scheme)["weight"].float()
        if static:
            tensors["input_scale"] = (0.02 + 0.01 * w[0, :1].abs()).float()
        return Packed(tensors, dequantized)

    def scales(w: Tensor) -> Tensors:
        args = scheme.weights
        if is_int4:
            symmetric, size = args.symmetric, args.group_size
            _, zero, scale, _ = to_int4(w, size, symmetric=symmetric, negative=negative)
            zeros = {} if symmetric else {"weight_zero_point": (zero - 8).to(torch.int8)}
            return {"weight_scale": scale.bfloat16(), **zeros}
        if args.strategy == "block":
            return {"weight_scale": (blocks_of(w)[0] / 448).bfloat16()}
        by_row = args.strategy == "channel"
        largest = w.abs().amax(1, keepdim=True) if by_row else w.abs().max()[None]
        return {"weight_scale": (largest / 448).bfloat16()}

    return Format(config, pack, None if rounds is None else rounds[inputs.strategy])


FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}

E2M1_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT_NVFP4 = {
    "config_groups": {
        "group_0": {
            "input_activations": E2M1_GROUP,
            "weights": E2M1_GROUP,
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.embed_vision*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_method": "modelopt",
}

FORMATS: dict[str, Format] = {
    "fp8-block": Format(FP8_BLOCK, pack_fp8_block, "group"),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w: pack_fp8_tensor(w, static=False),
        "token",
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w: pack_fp8_tensor(w, static=True),
        "static",
    ),
    "fp8-transformers": Format(  # as Ministral-3 is published
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        partial(pack_as_transformers, static=True),
        "static",
    ),
    "modelopt": Format(
        {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "exclude_modules": ["lm_head"]},
        lambda w: pack_fp8_tensor(w, static=True),
        "static",
    ),
    "modelopt-rows": Format(
        {
            "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
            "producer": {"name": "modelopt"},
            "exclude_modules": ["lm_head"],
        },
        partial(pack_fp8_rows, flat=True),
        "token",
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        pack_fp8_rows,
        "token",
    ),
    "ct-fp8-channel": compressed("FP8_DYNAMIC"),
    "ct-fp8-static": compressed("FP8"),
    "ct-fp8-block": compressed("FP8_BLOCK"),
    "ct-fp8-weights": compressed("FP8_BLOCK", weights_alone=True),
    "ct-int8": int8(),
    "ct-int4": compressed("W4A16"),
    "ct-int4-64": compressed("W4A16", group_size=64, actorder="static"),
    "ct-int4-zeros": compressed("W4A16_ASYM"),
    "ct-int4-zeros-32": compressed("W4A16_ASYM", group_size=32),
    "awq": Format(AWQ, pack_awq),
    "awq-64": Format({**AWQ, "group_size": 64}, lambda w: pack_awq(w, 64)),
    "gptq": Format(GPTQ, pack_gptq),
    "gptq-v2-32": Format(
        {**GPTQ, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda w: pack_gptq(w, 32, v2=True),
    ),
    "nvfp4": nvfp4(),
    "nvfp4-modelopt": Format(MODELOPT_NVFP4, partial(pack_nvfp4, modelopt=True)),
    "modelopt-mixed": mixture(lambda path: "FP8" if "_attn." in path else "W4A16_NVFP4"),
}


# Of a delta net to its gates, which published checkpoints keep.
TO_GATES = ("in_proj_a.weight", "in_proj_b.weight")


# -- whole checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """A quantised checkpoint, and one of the same weights in float32."""

    spec: Spec
    format: Format
    folder: Path
    plain: Path
    packed: Mapping[str, Packed]  # by the names of linear maps, without 'model.'


def quantize(
    spec: Spec,
    format: Format,
    folder: Path,
    *,
    keeps: Callable[[str], bool] = lambda name: False,
    with_head: bool = False,
) -> Quantized:
    """keeps: the linear maps of layers that are left alone. with_head: not the head's."""
    spec = dataclasses.replace(spec, sharded=False)
    quantized, plain = folder / "quantized", folder / "plain"
    for target in (quantized, plain):
        make_checkpoint(spec, target)
    tensors = load_file(plain / "model.safetensors")
    stored, same, packed = dict(tensors), dict(tensors), {}
    quantized_paths: list[str] = []
    for name, weight in tensors.items():
        path = name.removesuffix(".weight")
        is_map = "_proj" in name and not name.endswith("bias") and not keeps(path)
        if not is_map and not (with_head and path == "lm_head"):
            continue
        packed[path.removeprefix("model.")] = made = format.of(path).pack(weight)
        quantized_paths.append(path)
        del stored[name]
        stored |= {f"{path}.{kind}": tensor.contiguous() for kind, tensor in made.tensors.items()}
        same[name] = made.weight.contiguous()
    save_file(same, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    edit_config(quantized, quantization_config=format.config_of(quantized_paths))
    return Quantized(spec, format, quantized, plain, packed)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


# -- transformers ---------------------------------------------------------------------------------


def load_plain(case: Quantized) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        case.plain,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model


def round_inputs(
    case: Quantized, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ranks: int = 1
) -> None:
    """Make transformers round the inputs of the quantised linear maps as the format says, where
    each of the ranks rounds those that it has."""
    if case.format.rounds is None:
        return
    scales = {
        weight.untyped_storage().data_ptr(): (
            case.format.of(name).rounds,
            input_scale(case, name.removesuffix(".weight")),
        )
        for name, weight in model.named_parameters()
        if "_proj" in name and not name.endswith(("bias", *TO_GATES))
    }
    divided = {
        weight.untyped_storage().data_ptr()
        for name, weight in model.named_parameters()
        if name.removesuffix(".weight").endswith(("o_proj", "down_proj", "out_proj"))
    }
    linear = F.linear

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        at = weight.untyped_storage().data_ptr()
        if at in scales:
            rounds, static = scales[at]
            if rounds is None:
                return linear(x, weight, bias)
            if static is not None:  # of experts, which are one parameter, each has its own
                static = static.flatten()[weight.storage_offset() // weight.numel()]
            parts = x.chunk(ranks if at in divided else 1, dim=-1)
            x = torch.cat([round_x(part, rounds, static) for part in parts], dim=-1)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", rounding)


_OF_ONE_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)


def input_scale(case: Quantized, name: str) -> Tensor | None:
    """The largest of the maps that have one input in common; of experts [num_experts]."""
    if case.format.of(name).rounds != "static":
        return None
    parent, _, kind = name.removeprefix("model.").rpartition(".")

    def largest(*names: str) -> Tensor:
        return torch.stack([case.packed[n].tensors["input_scale"].reshape(()) for n in names]).max()

    if parent.endswith("experts"):
        maps = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        experts = range(case.spec.extra["num_experts"])
        return torch.stack([largest(*(f"{parent}.{e}.{map}" for map in maps)) for e in experts])
    for group in _OF_ONE_INPUT:
        if kind in group:
            return largest(*(f"{parent}.{part}" for part in group))
    return largest(f"{parent}.{kind}")


def round_x(x: Tensor, rounds: str | None, static: Tensor | None) -> Tensor:
    if rounds == "static":
        assert static is not None
        return (x / static).clamp(-448, 448).to(E4M3).float() * static
    width = 128 if rounds == "group" else x.shape[-1]
    parts = []
    for part in x.split(width, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / (127 if rounds == "int8" else 448)
        scale[scale == 0] = 1
        steps = part / scale
        steps = steps.round() if rounds == "int8" else steps.clamp(-448, 448).to(E4M3).float()
        parts.append(steps * scale)
    return torch.cat(parts, dim=-1)
