"""Linear maps and the embedding. Weights are allocated uninitialised; the loader fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from minisgl.kernels import fused
from minisgl.kernels.fused import LinearKernels, Residual


def empty_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b. x: [num_rows, in_features]; returns [num_rows, out_features]."""

    kernels: LinearKernels | None = None  # see share_kernels

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features)
        self.bias = empty_weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return fused.linear(x, self.weight, self.bias, self.kernels)

    def add(self, x: Tensor, rows: Tensor) -> Residual:
        """rows + y, which may be written over `rows`: [num_rows, out_features]."""
        return fused.linear_add(x, self.weight, self.bias, rows, self.kernels)


class MergedLinear(Linear):
    """Several linear maps of one input as one product; the outputs lie side by side.

    `parts` gives the name that each map has in a checkpoint and its number of outputs.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class Embedding(nn.Module):
    """Row `id` of the table for each id. token_ids: [n]; returns [n, hidden_size]."""

    kernels: LinearKernels | None = None  # for when the table is also the head

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return fused.embed(token_ids, self.weight)


def share_kernels(model: nn.Module) -> None:
    """Let the linear maps of a model, whose weights have their dtype and device, use the kernels
    that there are for these. They run one at a time, and so share what memory these need."""
    modules = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
    kernels = fused.linear_kernels([module.weight for module in modules])
    for module in modules:
        module.kernels = kernels


def tune(modules: Sequence[Linear | Embedding]) -> None:
    """Choose the algorithms of maps without bias that have share_kernels, by trying them."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for module in modules:
        by_shape.setdefault(module.weight.shape, []).append(module.weight)
    products = modules[0].kernels and modules[0].kernels.products
    if products:
        for weights in by_shape.values():
            products.tune(weights)
