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


class Quantization:
    """How the weights of a model are quantised, as far as layers know it."""

    only_experts: ClassVar[bool] = False  # no other linear maps are quantised


class MapFormat(Quantization, ABC):
    """A format of quantised linear maps, as far as layers know it: models/formats has them."""

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

    How a linear map is quantised may depend on its name, so a format knows the module whose layers
    it makes. Raises UnsupportedModelError for maps that one product cannot compute together, or
    whose sizes the scheme does not take.
    """

    dtype: torch.dtype  # of activations, norms and the embedding, and of what is not quantised
    scheme: Quantization | None = None  # of all that is quantised
    # Of a linear map by its full name; None: it is not quantised.
    scheme_of: Callable[[str], MapFormat | None] = lambda name: None
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
        scheme = self._common_scheme(full_names)
        if scheme is None:
            return DenseProduct.allocate(n, inputs.size, bias=bias, dtype=self.dtype)
        if padded := [part for part in parts if part.num_real < part.size]:
            raise UnsupportedModelError(
                f"{full_names[0]} has {padded[0].whole} outputs in {scheme}, which these ranks do "
                "not divide evenly; choose another --tp, or a checkpoint that leaves it alone."
            )
        b = torch.empty(n, dtype=self.dtype) if bias else None
        return scheme.linear(full_names[0], parts, inputs, b)

    def experts(self, held: HeldExperts) -> ExpertsProduct:
        """The products of the experts of which this module is the list, as far as a rank has
        them."""
        names = [f"{self.path}{e}.{name}" for e in range(held.whole) for name in EXPERT_MAPS]
        if self.scheme is not None and self.scheme.only_experts:
            names = [self.path.removesuffix(".")]
        if (scheme := self._common_scheme(names)) is not None:
            return scheme.experts(self.path, held, self.dtype)
        return DenseExperts.allocate(
            *held.sizes, dtype=self.dtype, bias=held.bias, clamped=held.clamped, gelu=held.gelu
        )

    def _common_scheme(self, names: Sequence[str]) -> MapFormat | None:
        """How these are quantised, which must be the same for all of them."""
        schemes = [self.scheme_of(name) for name in names]
        for name, scheme in zip(names, schemes, strict=True):
            if scheme != schemes[0]:
                described = (
                    f"{each} is {'not quantised' if its is None else f'in {its}'}"
                    for each, its in ((names[0], schemes[0]), (name, scheme))
                )
                raise UnsupportedModelError(
                    f"{' and '.join(described)}; minisgl computes both in one product, for which "
                    "they must be alike."
                )
        return schemes[0]


def num_rows(parts: Iterable[Shard]) -> int:
    return sum(part.size for part in parts)
