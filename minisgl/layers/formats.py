"""How the weights of a model are stored, which decides what multiplies by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.kernels.linear.dense import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.product import DenseExperts, ExpertsProduct


class WeightFormat(Protocol):
    """Makes the products of a model's layers, uninitialised and on torch's default device."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and the embedding."""
        ...

    def product(self, n: int, k: int, *, bias: bool) -> Product:
        """Of k inputs and n outputs."""
        ...

    def experts(self, num_experts: int, hidden_size: int, size: int) -> ExpertsProduct:
        """Of experts with an inner dimension of `size`."""
        ...


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Every weight has the dtype of the activations."""

    dtype: torch.dtype

    def product(self, n: int, k: int, *, bias: bool) -> Product:
        return DenseProduct.allocate(n, k, bias=bias, dtype=self.dtype)

    def experts(self, num_experts: int, hidden_size: int, size: int) -> ExpertsProduct:
        return DenseExperts.allocate(num_experts, hidden_size, size, dtype=self.dtype)
