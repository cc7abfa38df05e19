"""NVFP4: see kernels/linear/nvfp4.py. Where a checkpoint rounds inputs, too, here they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.linear.nvfp4 import BLOCK, Nvfp4Weights, pack_scales
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.linear.select_product import nvfp4_product
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.quantized_experts import Nvfp4Experts
from minisgl.layers.formats import HeldExperts, num_rows
from minisgl.models.config_reader import Fields
from minisgl.models.formats.quantized_format import Held, MatrixFormat, Reader, Sign
from minisgl.models.packing import checked, covering
from minisgl.models.target import FLOATS, Target, ignored
from minisgl.shards import Shard, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4(MatrixFormat[Nvfp4Weights]):
    """A subclass for each way in which a checkpoint names the tensors."""

    matrices: ClassVar[type] = Nvfp4Weights
    bits: ClassVar[int] = 4
    multiple: ClassVar[int] = CHUNK
    weight_name: ClassVar[str]
    factor_name: ClassVar[str]  # of one number for all weights of a map
    divides: ClassVar[bool]  # whether weights are divided by it, and not multiplied
    input_name: ClassVar[str]  # of what inputs would be rounded with

    def matrix_bytes(self, n: int, k: int) -> int:
        return n * k // 2 + n * k // BLOCK + 4 * n

    def __str__(self) -> str:
        return f"NVFP4 in blocks of {BLOCK}, inputs as they are"

    def allocate(
        self, name: str, parts: Sequence[Shard], inputs: Shard, *leading: int
    ) -> Nvfp4Weights:
        if inputs.size % CHUNK or inputs.first % BLOCK:
            raise UnsupportedModelError(
                f"{name} has {inputs.whole} inputs, {inputs.size} of them on each rank: of NVFP4 "
                f"weights these must be a multiple of {CHUNK}. Choose another --tp, or FP8 weights."
            )
        return Nvfp4Weights.allocate(*leading, num_rows(parts), inputs.size, is_tiled=bool(leading))

    def product(self, weights: Nvfp4Weights, bias: Tensor | None) -> Product:
        return nvfp4_product(weights, bias)

    def experts(self, path: str, held: HeldExperts, dtype: torch.dtype) -> ExpertsProduct:
        return Nvfp4Experts(*self.allocate_experts(path, held), gelu=held.gelu)

    def targets(self, held: Held[Nvfp4Weights]) -> dict[str, Target]:
        weights, outputs, inputs, _ = held

        def store_numbers(data: Tensor, part: Tensor) -> None:
            part = part.to(data.device)  # two columns in a byte, the first in the lower bits
            codes = torch.stack((part & 15, part >> 4), dim=-1)
            data.copy_(weights.words_of(codes.flatten(-2)))

        def store_scales(scale: Tensor, part: Tensor) -> None:
            scale.copy_(pack_scales(checked(part.to(scale.device).float())))

        def store_factor(factor: Tensor, part: Tensor) -> None:
            value = checked(part).float()
            if self.divides:
                if not value.all():
                    raise CheckpointError("holds 0, by which weights cannot be divided")
                value = 1 / value
            factor.fill_(value.item())

        blocks = covering(inputs, BLOCK)
        return {
            self.weight_name: Target(
                weights.data, (outputs, covering(inputs, 2)), ("U8",), store_numbers
            ),
            "weight_scale": Target(weights.scale, (outputs, blocks), ("F8_E4M3",), store_scales),
            self.factor_name: Target(
                weights.factor, (whole(1),), ("F32",), store_factor, scalar=True
            ),
            self.input_name: ignored(FLOATS),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedNvfp4(Nvfp4):
    """As compressed-tensors names them."""

    offered: ClassVar[str] = "NVFP4 (compressed-tensors)"
    sign: ClassVar[Sign | None] = "weight_packed", "U8"
    weight_name: ClassVar[str] = "weight_packed"
    factor_name: ClassVar[str] = "weight_global_scale"
    divides: ClassVar[bool] = True
    input_name: ClassVar[str] = "input_global_scale"

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"compressed-tensors nvfp4-pack-quantized": _read_compressed}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptNvfp4(Nvfp4):
    """As ModelOpt names them."""

    offered: ClassVar[str] = "NVFP4 (ModelOpt)"
    sign: ClassVar[Sign | None] = "weight", "U8"
    group: ClassVar[int] = BLOCK  # which its config says
    weight_name: ClassVar[str] = "weight"
    factor_name: ClassVar[str] = "weight_scale_2"
    divides: ClassVar[bool] = False
    input_name: ClassVar[str] = "input_scale"

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {f"modelopt {name}": lambda _: ModelOptNvfp4() for name in ("NVFP4", "W4A16_NVFP4")}


def _read_compressed(group: Fields) -> CompressedNvfp4:
    weights, inputs = group.part("weights"), group.part("input_activations")
    for part in (weights, inputs) if inputs.values else (weights,):
        part.require("num_bits", (4,), ": use an NVFP4, INT4 or FP8 checkpoint")
        part.require("type", ("float",))
        part.require("strategy", ("tensor_group",))
        part.require("group_size", (BLOCK,))
        part.require("symmetric", (None, True))
    weights.require("scale_dtype", (None, "torch.float8_e4m3fn"))
    return CompressedNvfp4()
