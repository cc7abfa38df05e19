"""The products of adapted rows, and that all others take the product behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.adapters import RANK_UNIT, AdapterWeights, allocate, b_of, places_of_parts
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.lora.select_kernels import kernels_for
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.lora.products import AdaptedProduct

CPU = torch.device("cpu")
KERNELS = kernels_for(CPU)
METHODS = [
    *("__call__", "of_norm", "of_input_norm", "of_kept_norm", "gated_mul"),
    *("gated_mul_of_norm", "gated_mul_of", "add_to", "send"),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapters(k: int, *widths: int) -> AdapterWeights:
    """Two of them, of which the first adds nothing."""
    weights = allocate(2, RANK_UNIT, k, widths, torch.float32, CPU)
    weights.ranks[1] = RANK_UNIT
    weights.a[1] = drawn(*weights.a.shape[1:])
    b_of(weights, 1, RANK_UNIT).copy_(drawn(sum(widths), RANK_UNIT))
    return weights


def rows_of(numbers: list[int]) -> Rows:
    of_rows = torch.tensor(numbers, dtype=torch.int32)
    places = torch.arange(len(numbers))
    return Rows(places, places, places, KERNELS.sort_rows(of_rows, 2))


class Norm:
    def __init__(self, size: int) -> None:
        self.weight, self.eps = 1 + 0.1 * drawn(size), 1e-6


def normed(x: Tensor, norm: Norm) -> Tensor:
    return x * (x.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def test_the_methods_are_those_of_a_product() -> None:
    own = {name for name in vars(Product) if not name.startswith("_")}
    of_weights = {"weights", "prepare", "plain", "can_refresh", "refresh"}
    assert own - of_weights == {*METHODS} - {"__call__"}


@pytest.mark.parametrize("rows", [None, Rows.of(torch.zeros(3), torch.zeros(3))])
@pytest.mark.parametrize("method", METHODS)
def test_without_adapted_rows_the_product_behind_is_asked_the_same(
    method: str, rows: Rows | None
) -> None:
    base = Mock(spec=Product)
    asked = base if method == "__call__" else getattr(base, method)
    arguments = {
        "gated_mul_of_norm": (object(), object(), object()),
        "__call__": (object(),),
        "gated_mul": (object(),),
    }.get(method, (object(), object()))
    options = {"gelu": True} if method.startswith("gated_mul") else {}
    found = getattr(AdaptedProduct(base, adapters(4, 4), KERNELS), method)(
        *arguments, rows, **options
    )
    assert found is asked.return_value
    asked.assert_called_once_with(*arguments, rows, **options)


class Rounding(Product):
    """A product that takes what only it understands from norms and activations, as FP8 on a GPU."""

    def __init__(self, base: Product) -> None:
        self.base = base

    @property
    def weights(self) -> Any:
        return self.base.weights

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.base(x.round(decimals=1), rows)

    def of_norm(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("asked for what only this product takes, or for what lacks adapters")

    gated_mul = gated_mul_of = gated_mul_of_norm = add_to = of_kept_norm = of_norm
    of_input_norm = send = of_norm


def case(k: int, *widths: int) -> tuple[AdaptedProduct, Callable[[Tensor, list[int]], Tensor]]:
    """A product that rounds x, and what it should compute."""
    weight, weights = drawn(sum(widths), k), adapters(k, *widths)
    b = b_of(weights, 1, RANK_UNIT)
    pairs = zip(places_of_parts(weights), weights.a[1], strict=True)
    added = torch.cat([b[columns] @ a for columns, a in pairs])

    def wanted(x: Tensor, numbers: list[int]) -> Tensor:
        has = torch.tensor([[number == 2] for number in numbers])
        return x.round(decimals=1) @ weight.mT + has * (x @ added.mT)

    return AdaptedProduct(Rounding(DenseProduct(weight)), weights, KERNELS), wanted


@pytest.mark.parametrize("numbers", [[2], [0, 2, 1, 2], [0, 0], [1, 0]])
def test_an_adapter_multiplies_rows_that_are_not_rounded(numbers: list[int]) -> None:
    (up, up_of), (down, down_of) = case(8, 6, 6), case(6, 8)
    rows, norm, stream = rows_of(numbers), Norm(8), drawn(len(numbers), 8)
    x = normed(stream, norm)
    y, kept = up.of_norm(Residual(stream.clone()), norm, rows)
    torch.testing.assert_close(y, up_of(x, numbers))
    torch.testing.assert_close(kept, stream)
    torch.testing.assert_close(up.of_input_norm(stream, norm, rows), up_of(x, numbers))
    found_x, y, _ = up.of_kept_norm(Residual(stream.clone()), norm, rows)
    torch.testing.assert_close(found_x, x)
    torch.testing.assert_close(y, up_of(x, numbers))

    gate, other = up_of(x, numbers).chunk(2, 1)
    inner = F.silu(gate) * other
    found, _ = up.gated_mul_of_norm(Residual(stream.clone()), norm, down, rows)
    torch.testing.assert_close(found, inner)
    torch.testing.assert_close(up.gated_mul_of(x, down, rows), inner)
    torch.testing.assert_close(down.gated_mul(torch.cat((gate, other), 1), rows), inner)

    y = down.add_to(inner, stream.clone(), rows)
    assert y.delta is not None
    torch.testing.assert_close(y.delta, down_of(inner, numbers))
    assert down.send(inner, Mock(), rows) is None
