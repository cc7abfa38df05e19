"""MXFP4 of gpt-oss, of experts alone: see kernels/moe/mxfp4.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.kernels.linear.e2m1 import pack_e2m1, tiled
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.mxfp4 import (
    BLOCK,
    EXPONENT_BIAS,
    LARGEST_EXPONENT,
    Mxfp4Experts,
    Mxfp4Weights,
    packed_scales,
)
from minisgl.kernels.moe.reference import ExpertBiases
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import HeldExperts
from minisgl.models import interleaved_experts
from minisgl.models.config_reader import Fields, field_names
from minisgl.models.formats.quantized_format import OneFormat, Reader, Sign
from minisgl.models.packing import covering
from minisgl.models.target import Store, Target, copy
from minisgl.shards import Shard, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4(OneFormat):
    """Blocks of BLOCK columns that share a power of two. A checkpoint has one tensor of all
    experts."""

    offered: ClassVar[str] = "MXFP4 (gpt-oss)"
    sign: ClassVar[Sign | None] = "gate_up_proj_blocks", "U8"
    matrices: ClassVar[type] = Mxfp4Weights
    only_experts: ClassVar[bool] = True
    bits: ClassVar[int] = 4
    multiple: ClassVar[int] = CHUNK

    @classmethod
    def readers(cls) -> dict[str, Reader]:
        return {"mxfp4": _read}

    def matrix_bytes(self, n: int, k: int) -> int:
        return n * k // 2 + 2 * n * k // BLOCK

    def __str__(self) -> str:
        return f"MXFP4 experts in blocks of {BLOCK}"

    def experts(self, path: str, held: HeldExperts, dtype: torch.dtype) -> ExpertsProduct:
        (number, hidden_size, size), inner = held.sizes, held.inner
        if hidden_size % CHUNK or inner.whole % BLOCK:
            raise UnsupportedModelError(
                f"{path}: MXFP4 experts need a multiple of {CHUNK} inputs and of "
                f"{BLOCK} inner ones, not {hidden_size} and {inner.whole}."
            )
        return Mxfp4Experts(
            Mxfp4Weights.allocate(number, 2 * size, hidden_size),
            Mxfp4Weights.allocate(number, hidden_size, size),
            ExpertBiases.allocate(*held.sizes, dtype) if held.bias else None,
            held.clamped,
        )

    def expert_targets(self, path: str, module: FusedExperts) -> dict[str, Target]:
        product = module.product
        assert isinstance(product, Mxfp4Experts)
        experts, hidden, inner = module.own, module.hidden, module.inner
        cuts = (experts, inner.times(2), hidden), (experts, hidden, inner)
        found = {
            **_targets("gate_up_proj", product.gate_up, cuts[0], interleaved_experts.store_in_turn),
            **_targets("down_proj", product.down, cuts[1], copy),
        }
        named = {f"{path}.{kind}": target for kind, target in found.items()}
        return interleaved_experts.bias_targets(path, module) | named


def _targets(
    name: str, weights: Mxfp4Weights, cut: tuple[Shard, Shard, Shard], store: Store
) -> dict[str, Target]:
    """Blocks [num_experts, outputs, blocks of inputs, 16], two numbers in a byte, the lower bits
    first, and their exponents. store: puts the outputs in order."""
    experts, outputs, inputs = cut
    blocks = covering(inputs, BLOCK)

    def ordered(part: Tensor) -> Tensor:
        """Of all rows and blocks of the weights, with zeros for those that the checkpoint lacks."""
        rows = part.new_empty((len(part), outputs.size, blocks.size, *part.shape[3:]))
        store(rows, part)
        return rows

    def store_blocks(data: Tensor, part: Tensor) -> None:
        for words, of_expert in zip(data, part.split(1), strict=True):
            [codes] = ordered(of_expert.to(data.device))
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
            words.copy_(tiled(pack_e2m1(pairs.flatten(1))))

    def store_exponents(scale: Tensor, part: Tensor) -> None:
        if part.numel() and int(part.max()) > EXPONENT_BIAS + LARGEST_EXPONENT:
            raise CheckpointError(
                f"holds scales that are no numbers, or larger than 2 ** {LARGEST_EXPONENT}"
            )
        scale.copy_(packed_scales(ordered(part.to(scale.device))))

    bytes_of = whole(BLOCK // 2)
    return {
        f"{name}_blocks": Target(
            weights.data, (experts, outputs, blocks, bytes_of), ("U8",), store_blocks
        ),
        f"{name}_scales": Target(
            weights.scale, (experts, outputs, blocks), ("U8",), store_exponents
        ),
    }


def _read(fields: Fields) -> Mxfp4:
    fields.refuse_others(field_names("dequantize"))
    fields.require("dequantize", (None, False))
    return Mxfp4()
