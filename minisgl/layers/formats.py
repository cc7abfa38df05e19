"""Formats in which the weights of a model are stored, each with its products."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from minisgl.config import BLOCK, Activations, QuantScheme
from minisgl.errors import UnsupportedModelError
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import (
    CHUNK,
    Fp8Weights,
    Int4Weights,
)
from minisgl.kernels.linear.select_product import fp8_product, int4_product
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.mxfp4 import Mxfp4Experts, Mxfp4Weights
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales, Int4Experts
from minisgl.kernels.moe.reference import Clamped, ExpertBiases
from minisgl.shards import Shard, whole

EXPERT_MAPS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldExperts:
    """The experts of a layer that a rank has, or its part of each."""

    whole: int  # the number of all ranks' experts
    number: int
    hidden_size: int
    inner: Shard  # of the inner dimension of each
    bias: bool = False
    clamped: Clamped | None = None  # the activation, if it is not silu(gate) · up
    gelu: bool = False  # gelu(gate) · up

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Their number, and what their matrices have of either dimension."""
        return self.number, self.hidden_size, self.inner.size


class WeightFormat(Protocol):
    """Makes the products of a model's layers, uninitialised and on torch's default device.

    Which format a linear map has may depend on its name, so a format knows the module whose layers
    it makes.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, norms and the embedding."""
        ...

    def within(self, name: str) -> WeightFormat:
        """The format of a submodule, by its name in the checkpoint."""
        ...

    def product(
        self, names: Collection[str], parts: Sequence[Shard], inputs: Shard, *, bias: bool
    ) -> Product:
        """The product of these parts of linear maps of one input, as columns side by side. names:
        of the maps in a checkpoint."""
        ...

    def experts(self, held: HeldExperts) -> ExpertsProduct:
        """The products of the experts of which this module is the list, as far as a rank has
        them."""
        ...


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Every weight has the dtype of the activations."""

    dtype: torch.dtype

    def within(self, name: str) -> DenseFormat:
        return self

    def product(
        self, names: Collection[str], parts: Sequence[Shard], inputs: Shard, *, bias: bool
    ) -> Product:
        return DenseProduct.allocate(num_rows(parts), inputs.size, bias=bias, dtype=self.dtype)

    def experts(self, held: HeldExperts) -> ExpertsProduct:
        return DenseExperts.allocate(
            *held.sizes, dtype=self.dtype, bias=held.bias, clamped=held.clamped, gelu=held.gelu
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """Some linear maps are quantised by one scheme; the others have the dtype of the activations.

    Raises UnsupportedModelError for maps that one product cannot compute together, or whose sizes
    the scheme does not take.
    """

    dtype: torch.dtype
    scheme: QuantScheme
    activations: Activations  # what of the scheme's the device can do
    scale_dtype: torch.dtype  # of the scales of INT4 weights
    is_quantized: Callable[[str], bool]  # of the full name of a linear map
    path: str = ""  # of this module, with a dot at its end

    def within(self, name: str) -> QuantizedFormat:
        return replace(self, path=f"{self.path}{name}.")

    def product(
        self, names: Collection[str], parts: Sequence[Shard], inputs: Shard, *, bias: bool
    ) -> Product:
        full_names = [self.path + name for name in names]
        if not self._all_quantized(full_names):
            return DenseFormat(self.dtype).product(names, parts, inputs, bias=bias)
        b = torch.empty(num_rows(parts), dtype=self.dtype) if bias else None
        if self.scheme.bits == 4:
            return int4_product(self._int4(full_names[0], num_rows(parts), inputs), b)
        static = self.activations == Activations.STATIC
        return fp8_product(
            self._fp8(parts, inputs),
            b,
            activations=self.activations,
            input_scale=torch.zeros((), dtype=torch.float32) if static else None,
        )

    def experts(self, held: HeldExperts) -> ExpertsProduct:
        names = [f"{self.path}{e}.{name}" for e in range(held.whole) for name in EXPERT_MAPS]
        if self.scheme.only_experts:
            names = [self.path.removesuffix(".")]
        if not self._all_quantized(names):
            return DenseFormat(self.dtype).experts(held)
        if self.scheme.only_experts:
            return self._mxfp4(held)
        if held.bias or held.clamped is not None:
            raise UnsupportedModelError(
                f"{names[0]} is of experts with biases or a clamped activation, which are not "
                f"supported in {self.scheme}; use the checkpoint in MXFP4 or bfloat16 as it is."
            )
        hidden, inner, num_held = whole(held.hidden_size), held.inner, held.number
        if self.scheme.bits == 4:
            return Int4Experts(
                self._int4(names[0], 2 * inner.size, hidden, num_held),
                self._int4(names[2], held.hidden_size, inner, num_held),
                gelu=held.gelu,
            )
        static = self.activations == Activations.STATIC
        scales = torch.zeros(2, num_held, dtype=torch.float32)
        return Fp8Experts(
            self._fp8([inner, inner], hidden, num_held),
            self._fp8([hidden], inner, num_held),
            activations=self.activations,
            input_scales=InputScales(*scales) if static else None,
            gelu=held.gelu,
        )

    def _mxfp4(self, held: HeldExperts) -> ExpertsProduct:
        (num_held, hidden_size, size), inner = held.sizes, held.inner
        if hidden_size % CHUNK or inner.whole % self.scheme.group_size:
            raise UnsupportedModelError(
                f"{self.path}: MXFP4 experts need a multiple of {CHUNK} inputs and of "
                f"{self.scheme.group_size} inner ones, not {hidden_size} and {inner.whole}."
            )
        return Mxfp4Experts(
            Mxfp4Weights.allocate(num_held, 2 * size, hidden_size),
            Mxfp4Weights.allocate(num_held, hidden_size, size),
            ExpertBiases.allocate(*held.sizes, self.dtype) if held.bias else None,
            held.clamped,
        )

    def _all_quantized(self, names: Sequence[str]) -> bool:
        """Whether these are quantised, which must hold for all of them or for none."""
        quantized = [self.is_quantized(name) for name in names]
        if any(quantized) and not all(quantized):
            yes, no = names[quantized.index(True)], names[quantized.index(False)]
            raise UnsupportedModelError(
                f"{yes} is quantised and {no} is not; minisgl computes both in one product, for "
                "which they must be alike."
            )
        return all(quantized)

    def _fp8(self, parts: Sequence[Shard], inputs: Shard, *leading: int) -> Fp8Weights:
        block = None
        if self.scheme.strategy == "block":
            block = block_size(parts), block_size([inputs])
        n = sum(part.size for part in parts)
        return Fp8Weights.allocate(*leading, n, inputs.size, block=block)

    def _int4(self, name: str, n: int, inputs: Shard, *leading: int) -> Int4Weights:
        if inputs.size % CHUNK or inputs.whole % self.scheme.group_size:
            raise UnsupportedModelError(
                f"{name} has {inputs.whole} inputs, {inputs.size} of them on each rank: those of "
                f"INT4 weights must be a multiple of the group size {self.scheme.group_size}, and "
                f"on each rank of {CHUNK}. Choose another --tp, or FP8 weights."
            )
        return Int4Weights.allocate(
            *leading,
            n,
            inputs.size,
            group_size=math.gcd(self.scheme.group_size, inputs.first, inputs.size),
            symmetric=self.scheme.symmetric,
            scale_dtype=self.scale_dtype,
        )


def num_rows(parts: Iterable[Shard]) -> int:
    return sum(part.size for part in parts)


def block_size(parts: Sequence[Shard]) -> int:
    """The size of blocks of one scale in a dimension of which a rank holds `parts`, side by side.

    Blocks of a checkpoint are BLOCK wide and begin where the whole dimension does. Here they begin
    where the parts do, and so must divide every boundary. Only the end of a dimension may cut one.
    """
    return math.gcd(BLOCK, *_boundaries(parts))


def _boundaries(parts: Sequence[Shard]) -> Iterable[int]:
    *others, last = parts
    for part in others:
        yield from (part.first, part.size)
    yield last.first
    if last.first + last.size < last.whole:
        yield last.size
