"""FP8: e4m3 numbers with a scale of each matrix, row or block."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from minisgl.config import Activations
from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import Fp8Weights, multiplies_fp8
from minisgl.kernels.linear.select_product import fp8_product
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales
from minisgl.layers.formats import HeldExperts, num_rows
from minisgl.models import packing
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.formats.quantized_format import Held, MatrixFormat, Reader, Sign
from minisgl.models.packing import checked, covering
from minisgl.models.target import FLOATS, Target, copy, ignored, storing
from minisgl.shards import Shard, whole

BLOCK = 128  # rows and columns of a matrix that share a scale, where scales are of blocks
_FP8_FIELDS = field_names(
    "activation_scheme fmt scale_fmt weight_block_size dequantize kv_cache_scheme"
)
_FBGEMM_FIELDS = field_names("activation_scale_ub")
# Of a matrix with one scale, as transformers writes it.
_RENAMED = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8(MatrixFormat[Fp8Weights]):
    """A scale of each row, or of the matrix: then each row here has a copy of it."""

    offered: ClassVar[str] = "FP8 (quant_method fp8, fbgemm_fp8 or compressed-tensors, ModelOpt)"
    option: ClassVar[str | None] = "fp8"
    sign: ClassVar[Sign | None] = "weight", "F8_E4M3"
    matrices: ClassVar[type] = Fp8Weights

    of_rows: bool = True
    activations: Activations = Activations.NONE
    scales_inputs: bool = False  # a checkpoint has the scale of a map's inputs
    flat: bool = False  # a checkpoint has the scales of n rows as [n], not as [n, 1]

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {
            "fp8": _read_fp8,
            "fbgemm_fp8": _read_fbgemm,
            "modelopt FP8": lambda _: _STATIC,
            "modelopt FP8_PER_CHANNEL_PER_TOKEN": lambda _: replace(_BY_TOKEN, flat=True),
            "compressed-tensors float-quantized": _read_compressed,
            "compressed-tensors naive-quantized": _read_compressed,
        }

    def matrix_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * n

    def __str__(self) -> str:
        inputs = {
            Activations.NONE: "inputs as they are",
            Activations.TOKEN: "inputs rounded per token",
            Activations.GROUP: f"inputs rounded per token and {self.group} columns",
            Activations.STATIC: "inputs rounded with the checkpoint's scale",
        }[self.activations]
        return f"{self.described}, {inputs}"

    @property
    def described(self) -> str:
        return f"FP8 with one scale per {'row' if self.of_rows else 'matrix'}"

    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        return self if multiplies_fp8(device) else replace(self, activations=Activations.NONE)

    def block(self, parts: Sequence[Shard], inputs: Shard) -> tuple[int, int] | None:
        """The rows and columns that share a scale in these parts, where blocks do."""
        return None

    def allocate(
        self, name: str, parts: Sequence[Shard], inputs: Shard, *leading: int
    ) -> Fp8Weights:
        block = self.block(parts, inputs)
        return Fp8Weights.allocate(*leading, num_rows(parts), inputs.size, block=block)

    def product(self, weights: Fp8Weights, bias: Tensor | None) -> Product:
        static = self.activations == Activations.STATIC
        scale = torch.zeros((), dtype=torch.float32) if static else None
        return fp8_product(weights, bias, activations=self.activations, input_scale=scale)

    def experts(self, path: str, held: HeldExperts, dtype: torch.dtype) -> ExpertsProduct:
        if self.activations == Activations.NONE and runs_triton(torch.get_default_device()):
            raise UnsupportedModelError(
                f"{path}: a GPU has no kernels for experts in {self.described} whose inputs are "
                "not rounded; use a checkpoint that rounds them on a GPU with FP8 products, or one "
                "in bfloat16."
            )
        static = self.activations == Activations.STATIC
        scales = torch.zeros(2, held.number, dtype=torch.float32)
        return Fp8Experts(
            *self.allocate_experts(path, held),
            activations=self.activations,
            input_scales=InputScales(*scales) if static else None,
            gelu=held.gelu,
        )

    def named(self, name: str) -> str:
        path, dot, kind = name.rpartition(".")
        return name if self.of_rows else f"{path}{dot}{_RENAMED.get(kind, kind)}"

    def targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        cut = held.outputs, held.inputs
        scale = ignored(FLOATS)  # some exporters write one for dynamic inputs
        if self.scales_inputs:
            scale = Target(held.input_scale, (whole(1),), store=_store_largest, scalar=True)
        return {
            "weight": Target(held.weights.data, cut, ("F8_E4M3",), _store_e4m3),
            "input_scale": scale,
            **self.scale_targets(held),
        }

    def scale_targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        scale, one = held.weights.scale, whole(1)
        store = storing(lambda stored: checked(stored).flatten().expand(scale.shape))
        cut = (held.outputs, one) if self.of_rows else (one,)
        cut = (held.outputs,) if self.flat else cut
        return {"weight_scale": Target(scale, cut, store=store, scalar=not self.of_rows)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks(Fp8):
    """A scale of each block of BLOCK rows and columns."""

    stored: ClassVar[tuple[int, int]] = BLOCK, BLOCK  # a checkpoint's blocks
    group: ClassVar[int] = BLOCK

    scale_name: str = "weight_scale"

    def matrix_bytes(self, n: int, k: int) -> int:
        rows, columns = self.stored
        return n * k + 4 * -(-n // rows) * -(-k // columns)

    @property
    def described(self) -> str:
        return f"FP8 with blocks of {BLOCK}x{BLOCK}"

    def block(self, parts: Sequence[Shard], inputs: Shard) -> tuple[int, int]:
        rows, columns = self.stored
        return block_size(parts, rows), block_size([inputs], columns)

    def scale_targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        weights, *cut, _ = held
        assert weights.block is not None
        spread = partial(packing.block_scales, cut=cut, stored=self.stored, block=weights.block)
        read = tuple(map(covering, cut, self.stored))
        # Exponents where a checkpoint stores powers of two in a byte; torch knows few ops of these.
        store = storing(lambda scale: spread(scale.float()))
        return {self.scale_name: Target(weights.scale, read, (*FLOATS, "F8_E8M0"), store)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8WhileLoading(Fp8):
    """What --quantization fp8 makes of a checkpoint that is not quantised."""

    sign: ClassVar[Sign | None] = None

    activations: Activations = Activations.TOKEN

    def targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        return {"weight": _quantizing(held.weights, (held.outputs, held.inputs))}

    def stack_target(
        self, weights: Fp8Weights, first: int, cut: tuple[Shard, Shard, Shard]
    ) -> Target:
        held, rows = slice(cut[0].size), slice(first, first + cut[1].size)
        return _quantizing(Fp8Weights(weights.data[held, rows], weights.scale[held, rows]), cut)


FP8_WHILE_LOADING = Fp8WhileLoading()
_BY_TOKEN = Fp8(activations=Activations.TOKEN)
_STATIC = Fp8(of_rows=False, activations=Activations.STATIC, scales_inputs=True)


def _quantizing(weights: Fp8Weights, cut: tuple[Shard, ...]) -> Target:
    """Of tensors of which whole rows are read, since these share a scale."""
    *outputs, inputs = cut
    return Target(
        weights.data,
        (*outputs, whole(inputs.whole)),
        store=lambda _, part: packing.quantize_into(weights, part, inputs),
        scale=weights.scale,
    )


def _store_e4m3(weight: Tensor, part: Tensor) -> None:
    copy(weight, part)
    # NaN has all bits but the sign; looked for where the weights are, which may be a GPU.
    if weight.numel() and int((weight.view(torch.uint8) & 0x7F).amax()) == 0x7F:
        raise CheckpointError("holds NaN (bytes 7F or FF)")


def _store_largest(weight: Tensor, part: Tensor) -> None:
    scale = checked(part).flatten()[0].float().to(weight.device)
    if scale == 0:
        raise CheckpointError("holds the scale 0, by which inputs cannot be divided")
    if weight.numel():
        torch.maximum(weight, scale, out=weight)


def block_size(parts: Sequence[Shard], stored: int = BLOCK) -> int:
    """The size of blocks of one scale in a dimension of which a rank holds `parts`, side by side.

    Blocks of a checkpoint are `stored` wide and begin where the whole dimension does. Here they
    begin where the parts do, and so must divide every boundary. Only the end of a dimension may cut
    one.
    """
    *others, last = parts
    boundaries = [last.first, *(size for part in others for size in (part.first, part.size))]
    if last.first + last.size < last.whole:
        boundaries.append(last.size)
    return math.gcd(stored, *boundaries)


# -- configs --------------------------------------------------------------------------------------


def _read_fp8(fields: Fields) -> Fp8:
    fields.refuse_others(_FP8_FIELDS)
    fields.require("fmt", (None, "e4m3", "float8_e4m3fn"))
    # Scales that are powers of two: those of weights are, and for inputs others are as good.
    fields.require("scale_fmt", (None, "ue8m0"))
    fields.require("activation_scheme", ("dynamic", "static"))
    fields.require("dequantize", (None, False))
    static = fields.values["activation_scheme"] == "static"
    if fields.values.get("weight_block_size") is None:
        # Not one scale for all rows of a step: that would make rows depend on each other.
        return _STATIC if static else Fp8(of_rows=False, activations=Activations.TOKEN)
    fields.require("weight_block_size", ([BLOCK, BLOCK],))
    if static:
        raise fields.refused("activation_scheme", "with weight_block_size only dynamic is")
    return Fp8Blocks(activations=Activations.GROUP, scale_name="weight_scale_inv")


def _read_fbgemm(fields: Fields) -> Fp8:
    """activation_scale_ub, which cuts inputs off that are too large for it, is left aside: here
    the scale of a row follows its largest input."""
    fields.refuse_others(_FBGEMM_FIELDS)
    return _BY_TOKEN


def _read_compressed(group: Fields) -> Fp8:
    weights, inputs = require_e4m3(group)
    weights.require("strategy", ("tensor", "channel", "block"))
    strategy = weights.values["strategy"]
    if strategy == "block":
        weights.require("block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"))
        return Fp8Blocks(activations=read_groups(inputs, BLOCK))
    activations = _read_activations(inputs)
    static = activations == Activations.STATIC
    return Fp8(of_rows=strategy == "channel", activations=activations, scales_inputs=static)


def require_e4m3(group: Fields) -> tuple[Fields, Fields]:
    """What compressed-tensors says of weights and of inputs, which are e4m3, or as they are."""
    weights, inputs = group.part("weights"), group.part("input_activations")
    for part in (weights, inputs) if inputs.values else (weights,):
        part.require("num_bits", (8,), ": use an FP8 or INT4 checkpoint")
        part.require("type", ("float",))
        part.require("symmetric", (None, True))
    return weights, inputs


def read_groups(inputs: Fields, size: int) -> Activations:
    """How inputs are rounded that have a scale of every `size` columns, or none."""
    if not inputs.values:
        return Activations.NONE
    inputs.require("strategy", ("group",))
    inputs.require("group_size", (size,))
    inputs.require("dynamic", (True,))
    return Activations.GROUP


def _read_activations(inputs: Fields) -> Activations:
    if not inputs.values:
        return Activations.NONE
    inputs.require("dynamic", (None, False, True))
    if inputs.flag("dynamic", False):
        inputs.require("strategy", ("token", "tensor"))
        return Activations.TOKEN  # one scale for all rows would make them depend on each other
    inputs.require("strategy", ("tensor",))
    return Activations.STATIC
