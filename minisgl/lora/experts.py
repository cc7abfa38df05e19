"""Experts with adapters, in plain torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.quantized_experts import ExpertsOfProducts
from minisgl.kernels.moe.reference import Choice, Chosen, activated, choose, weighted_sum
from minisgl.kernels.rows import Rows
from minisgl.lora.files import Pair


class AdaptedExperts(ExpertsProduct):
    """The experts of another product, with B·A added to the matrices of each expert for each row
    that has an adapter."""

    def __init__(self, base: ExpertsProduct, parts: Sequence[Pair]) -> None:
        """parts: of gates, ups and maps down, A [num_adapters, num_experts, rank, k] and B
        [num_adapters, num_experts, n, rank]."""
        assert isinstance(base, DenseExperts | ExpertsOfProducts), "maps_of leaves others out"
        self.base = base
        self._parts = parts

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    @property
    def plain(self) -> ExpertsProduct:
        return self.base

    def reference(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        if rows is None or rows.adapted is None:
            return self.base.reference(x, choice)
        experts, weights, num_experts = choose(choice)
        y, of_rows = torch.empty_like(x), rows.adapted.adapters
        for number in of_rows.unique().tolist():
            which = (of_rows == number).nonzero()[:, 0]
            chosen = Chosen(experts[which], weights[which], num_experts)
            if number:
                y[which] = weighted_sum(x[which], self._outputs(number - 1), chosen)
            else:
                y[which] = self.base.reference(x[which], chosen)
        return y

    def _outputs(self, slot: int) -> Callable[[int, Tensor], Tensor]:
        """What each expert makes of rows with the adapter in this slot."""
        *to_inner, down = self._parts

        def added(x: Tensor, parts: Sequence[Pair], expert: int) -> Tensor:
            pairs = [(part.a[slot, expert].float(), part.b[slot, expert].float()) for part in parts]
            return torch.cat([x.float() @ a.mT @ b.mT for a, b in pairs], 1).to(x.dtype)

        def output(expert: int, x: Tensor) -> Tensor:
            if isinstance(self.base, DenseExperts):
                of_up, of_down, biases, clamped, gelu = self.base.experts
                up_bias, down_bias = (each[expert] for each in biases) if biases else (None, None)
                gate_up = F.linear(x, of_up[expert], up_bias) + added(x, to_inner, expert)
                inner = activated(gate_up, clamped, gelu)
                y = F.linear(inner, of_down[expert], down_bias)
            else:
                of_x, of_inner = self.base.products(expert)
                inner = activated(of_x(x) + added(x, to_inner, expert), None, self.base.gelu)
                y = of_inner(inner)
            return y + added(inner, [down], expert)

        return output
