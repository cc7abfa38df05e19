"""Formats in which the weights of a model are stored, each with its products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from minisgl.errors import UnsupportedModelError
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.reference import Clamped
from minisgl.shards import Shard

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


class Quantization(ABC):
    """A format of quantised weights, as far as layers know it: models/formats has the formats."""

    only_experts: ClassVar[bool] = False  # no other linear maps are quantised

    def linear(
        self, name: str, parts: Sequence[Shard], inputs: Shard, bias: Tensor | None
    ) -> Product:
        """As WeightFormat.product. name: of one of the maps."""
        raise UnsupportedModelError(f"{name} is in {self}, which are supported of experts alone.")

    @abstractmethod
    def experts(self, path: str, held: HeldExperts, dtype: torch.dtype) -> ExpertsProduct:
        """As WeightFormat.experts. path: of the module, with a dot at its end."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Makes the products of a module's layers, uninitialised and on torch's default device.

    Whether a linear map is quantised may depend on its name, so a format knows the module whose
    layers it makes. Raises UnsupportedModelError for maps that one product cannot compute together,
    or whose sizes the scheme does not take.
    """

    dtype: torch.dtype  # of activations, norms and the embedding, and of what is not quantised
    scheme: Quantization | None = None
    is_quantized: Callable[[str], bool] = lambda name: False  # of the full name of a linear map
    path: str = ""  # of this module, with a dot at its end

    def within(self, name: str) -> WeightFormat:
        """The format of a submodule, by its name in the checkpoint."""
        return replace(self, path=f"{self.path}{name}.")

    def product(
        self, names: Collection[str], parts: Sequence[Shard], inputs: Shard, *, bias: bool
    ) -> Product:
        """The product of these parts of linear maps of one input, as columns side by side. names:
        of the maps in a checkpoint."""
        full_names = [self.path + name for name in names]
        n = num_rows(parts)
        if self.scheme is None or not self._all_quantized(full_names):
            return DenseProduct.allocate(n, inputs.size, bias=bias, dtype=self.dtype)
        b = torch.empty(n, dtype=self.dtype) if bias else None
        return self.scheme.linear(full_names[0], parts, inputs, b)

    def experts(self, held: HeldExperts) -> ExpertsProduct:
        """The products of the experts of which this module is the list, as far as a rank has
        them."""
        names = [f"{self.path}{e}.{name}" for e in range(held.whole) for name in EXPERT_MAPS]
        if self.scheme is not None and self.scheme.only_experts:
            names = [self.path.removesuffix(".")]
        if self.scheme is not None and self._all_quantized(names):
            return self.scheme.experts(self.path, held, self.dtype)
        return DenseExperts.allocate(
            *held.sizes, dtype=self.dtype, bias=held.bias, clamped=held.clamped, gelu=held.gelu
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


def num_rows(parts: Iterable[Shard]) -> int:
    return sum(part.size for part in parts)
