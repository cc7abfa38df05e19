"""INT8 (W8A8) of compressed-tensors: integers with a scale of each row, or of the matrix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.layers.formats import num_rows
from minisgl.models.config_reader import Fields
from minisgl.models.formats.fp8 import Fp8
from minisgl.models.formats.int4 import CENTRED
from minisgl.models.formats.quantized_format import Held, Reader, Sign
from minisgl.models.target import Target, copy
from minisgl.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Fp8):
    """As FP8 with inputs rounded per token, but of integers: all GPUs multiply them."""

    offered: ClassVar[str] = "INT8 (compressed-tensors int-quantized)"
    option: ClassVar[str | None] = None
    sign: ClassVar[Sign | None] = "weight", "I8"

    activations: Activations = Activations.TOKEN

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"compressed-tensors int-quantized": _read_compressed}

    @property
    def described(self) -> str:
        return f"INT8 with one scale per {'row' if self.of_rows else 'matrix'}"

    def on(
        self, device: torch.device, dtype: torch.dtype, scales: Collection[str] | None = None
    ) -> Self:
        return self

    def allocate(
        self, name: str, parts: Sequence[Shard], inputs: Shard, *leading: int
    ) -> Fp8Weights:
        shape = *leading, num_rows(parts), inputs.size
        return Fp8Weights.allocate(*shape, block=None, dtype=torch.int8)

    def targets(self, held: Held[Fp8Weights]) -> dict[str, Target]:
        weight = Target(held.weights.data, (held.outputs, held.inputs), ("I8",), copy)
        return {"weight": weight, "weight_zero_point": CENTRED, **self.scale_targets(held)}


def _read_compressed(group: Fields) -> Int8:
    weights, inputs = group.part("weights"), group.part("input_activations")
    if not inputs.values:
        raise group.refused(
            "input_activations", "use an INT8 checkpoint whose inputs are rounded per token"
        )
    for part in (weights, inputs):
        part.require("num_bits", (8,), " in int-quantized: use a W8A8, FP8 or INT4 checkpoint")
        part.require("type", ("int",), " in int-quantized")
        part.require("symmetric", (None, True), ": use a symmetric checkpoint, or an FP8 one")
    inputs.require("dynamic", (True,), ": use a checkpoint with dynamic scales, or an FP8 one")
    inputs.require("strategy", ("token",))
    weights.require("strategy", ("channel", "tensor"))
    return Int8(of_rows=weights.values["strategy"] == "channel")
