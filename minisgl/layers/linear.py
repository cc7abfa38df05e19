"""Linear maps and the embedding. Weights are allocated uninitialised; the loader fills them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def empty_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b. x: [..., in_features]; returns [..., out_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features)
        self.bias = empty_weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear maps of one input as one product; the outputs lie side by side.

    `parts` gives the name that each map has in a checkpoint and its number of outputs.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class Embedding(nn.Module):
    """Row `id` of the table for each id. token_ids: [n]; returns [n, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)
