"""MXFP8, of the OCP microscaling specification (v1.0): e4m3 numbers in blocks of 32 columns of a
row, which share a power of two.

Here these are FP8 weights like any with blocks. Where a checkpoint rounds the inputs, too, their
scales are not powers of two, but those that use the whole range of e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.formats.fp8 import Fp8Blocks, read_groups, require_e4m3
from minisgl.models.formats.quantized_format import Held, Reader
from minisgl.models.target import Target

BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8(Fp8Blocks):
    """FP8 with a scale of each row and BLOCK columns."""

    offered: ClassVar[str] = "MXFP8 (quant_method mxfp8, compressed-tensors, ModelOpt)"
    stored: ClassVar[tuple[int, int]] = 1, BLOCK
    group: ClassVar[int] = BLOCK

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {
            "mxfp8": _read_mxfp8,
            "modelopt MXFP8": lambda _: Mxfp8(activations=Activations.GROUP),
            "compressed-tensors mxfp8-quantized": _read_compressed,
        }

    @property
    def described(self) -> str:
        return f"MXFP8 in blocks of {BLOCK}"

    def scale_targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        [(name, target)] = Fp8Blocks.scale_targets(self, held).items()

        def store(weight: Tensor, part: Tensor) -> None:
            """Exponents; that of NaN is refused as a scale that is not finite."""
            target.store(weight, part.view(torch.float8_e8m0fnu).float())

        return {name: replace(target, dtypes=("U8", "F8_E8M0"), store=store)}


def _read_mxfp8(fields: Fields) -> Mxfp8:
    fields.refuse_others(field_names("activation_scheme fmt scale_fmt weight_block_size"))
    fields.require("fmt", (None, "e4m3", "float8_e4m3fn"))
    fields.require("scale_fmt", (None, "ue8m0"))
    fields.require("activation_scheme", (None, "dynamic"))
    fields.require("weight_block_size", (None, [1, BLOCK]))
    return Mxfp8(activations=Activations.GROUP, scale_name="weight_scale_inv")


def _read_compressed(group: Fields) -> Mxfp8:
    weights, inputs = require_e4m3(group)
    weights.require("strategy", ("group",))
    weights.require("group_size", (BLOCK,))
    weights.require("scale_dtype", (None, "torch.uint8"))
    return Mxfp8(activations=read_groups(inputs, BLOCK))
