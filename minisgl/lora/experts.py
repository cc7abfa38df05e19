"""Experts with adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.kernels.adapters import ExpertAdapters, StackedAdapters
from minisgl.kernels.moe.experts_product import Adapted, ExpertsProduct
from minisgl.kernels.moe.reference import Choice, Chosen, Expert, choose, weighted_sum
from minisgl.kernels.rows import Rows


class AdaptedExperts(ExpertsProduct):
    """The experts of another product, with B·A added to the matrices of each expert for each row
    that has an adapter."""

    def __init__(self, base: ExpertsProduct, adapters: ExpertAdapters) -> None:
        self._base, self._adapters = base, adapters

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._base.weights

    @property
    def plain(self) -> ExpertsProduct:
        return self._base

    def expert(self, index: int) -> Expert:
        return self._base.expert(index)

    def adapted(self, rows: Rows | None) -> Adapted | None:
        if rows is None or rows.adapted is None:
            return None
        return self._adapters, rows.adapted.adapters

    def reference(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        if (adapted := self.adapted(rows)) is None:
            return self._base.reference(x, choice)
        _, of_rows = adapted
        experts, weights, num_experts = choose(choice)
        y = torch.empty_like(x)
        for number in of_rows.unique().tolist():

            def expert(index: int, number: int = number) -> Expert:
                return self._with_adapter(number, index) if number else self._base.expert(index)

            which = (of_rows == number).nonzero()[:, 0]
            chosen = Chosen(experts[which], weights[which], num_experts)
            y[which] = weighted_sum(x[which], expert, chosen)
        return y

    def _with_adapter(self, number: int, index: int) -> Expert:
        gate_up, activated, down = self._base.expert(index)

        def added(x: Tensor, weights: StackedAdapters) -> Tensor:
            rank = int(weights.ranks[number - 1])
            a = weights.a[number - 1, :, index, :rank].float()
            b = weights.b[number - 1, :, index, :, :rank].float()
            return (x.float() @ a.mT @ b.mT).movedim(0, 1).flatten(1).to(x.dtype)

        return Expert(
            lambda x: gate_up(x) + added(x, self._adapters.gate_up),
            activated,
            lambda inner: down(inner) + added(inner, self._adapters.down),
        )
