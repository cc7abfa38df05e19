"""Products with adapters, in plain torch on any device: what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.quantized_experts import ExpertsOfProducts
from minisgl.kernels.moe.reference import Choice, Chosen, activated, choose, weighted_sum
from minisgl.kernels.rows import Rows
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.lora.files import Pair
from minisgl.lora.maps import Fitted, Maps, Site


@dataclass(frozen=True, slots=True)
class Stacks:
    """The matrices of all adapters on the device, by the path of each site: A and B of each part,
    with a leading dimension of adapters, whose numbers start at 1."""

    of_sites: Mapping[str, tuple[Pair, ...]]
    numbers: Tensor  # [num_slots] int32: the adapter of each slot's request; 0: none

    @staticmethod
    def allocate(
        maps: Maps,
        num_adapters: int,
        rank: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Stacks:
        """num_slots: with the scratch slot."""

        def stack(site: Site, part: int) -> Pair:
            shapes = ((num_adapters, *shape) for shape in site.shapes(part, rank))
            return Pair(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))

        return Stacks(
            {
                path: tuple(stack(site, part) for part in range(len(site.parts)))
                for path, site in maps.sites.items()
            },
            torch.zeros(num_slots, dtype=torch.int32, device=device),
        )

    def fill(self, number: int, fitted: Fitted) -> None:
        """Make these matrices those of the adapter with this number."""
        for path, stacks in self.of_sites.items():
            for stack, pair in zip(stacks, fitted.get(path, [None] * len(stacks)), strict=True):
                if pair is None:
                    stack.b[number - 1].zero_()
                else:
                    stack.a[number - 1].copy_(pair.a)
                    stack.b[number - 1].copy_(pair.b)

    def attach(self, maps: Maps) -> None:
        """Put products with these adapters into the model, whose products are prepared."""
        for path, site in maps.sites.items():
            stacks, module = self.of_sites[path], site.module
            if isinstance(module, Linear):
                module.replace_product(AdaptedProduct(module.product, stacks, self.numbers))
            elif isinstance(module, FusedExperts):
                module.product = AdaptedExperts(module.product, stacks, self.numbers)


def _of_adapters(numbers: Tensor, rows: Rows) -> Iterator[tuple[int, Tensor]]:
    """The numbers of the adapters that some rows have, 0 for none, and which rows."""
    of_rows = numbers[rows.slots]
    for number in of_rows.unique().tolist():
        yield number, (of_rows == number).nonzero()[:, 0]


def _delta(x: Tensor, parts: Sequence[Pair], number: int) -> Tensor:
    """(x Aᵀ) Bᵀ of an adapter's parts, side by side, in float32."""
    x = x.float()
    return torch.cat(
        [x @ part.a[number - 1].float().mT @ part.b[number - 1].float().mT for part in parts], 1
    )


class AdaptedProduct(Product):
    """y of another product, with B·A added to W for each row that has an adapter.

    The other methods are the defaults, so what it multiplies is a tensor, also where the product
    behind it would take rounded rows of a norm or an activation.
    """

    def __init__(self, base: Product, parts: Sequence[Pair], numbers: Tensor) -> None:
        """parts, numbers: as of Stacks."""
        self.base, self._parts, self._numbers = base, parts, numbers

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        y = self.base(x, rows)
        for number, which in () if rows is None else _of_adapters(self._numbers, rows):
            if number:
                y[which] += _delta(x[which], self._parts, number).to(y.dtype)
        return y


class AdaptedExperts(ExpertsProduct):
    """The experts of another product, with B·A added to the matrices of each expert for each row
    that has an adapter."""

    def __init__(self, base: ExpertsProduct, parts: Sequence[Pair], numbers: Tensor) -> None:
        """parts: those of gates, ups and maps down. numbers: as of Stacks."""
        assert isinstance(base, DenseExperts | ExpertsOfProducts), "maps_of leaves others out"
        self.base = base
        self._parts, self._numbers = parts, numbers

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.base.weights

    def has_kernels(self, device: torch.device) -> bool:
        return False

    def reference(self, x: Tensor, choice: Choice, rows: Rows | None = None) -> Tensor:
        if rows is None:
            return self.base.reference(x, choice)
        experts, weights, num_experts = choose(choice)
        y = torch.empty_like(x)
        for number, which in _of_adapters(self._numbers, rows):
            chosen = Chosen(experts[which], weights[which], num_experts)
            if number:
                y[which] = weighted_sum(x[which], self._outputs(number), chosen)
            else:
                y[which] = self.base.reference(x[which], chosen)
        return y

    def _outputs(self, number: int) -> Callable[[int, Tensor], Tensor]:
        """What each expert makes of rows with this adapter."""
        *to_inner, down = self._parts

        def added(x: Tensor, parts: Sequence[Pair], expert: int) -> Tensor:
            of_expert = [Pair(part.a[:, expert], part.b[:, expert]) for part in parts]
            return _delta(x, of_expert, number).to(x.dtype)

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
