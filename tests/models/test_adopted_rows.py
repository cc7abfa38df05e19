"""Rows that are computed when it is known what for equal those that are computed at once."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.moe.reference import ByRouter, Routing, fused_experts, topk_softmax
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.adopted.modules import MapOf, NormOf, SharedProduct
from minisgl.models.adopted.rows import ExpertSum, LaterRows, StreamError
from minisgl.shards import whole

SIZE, INNER, NUM_ROWS = 12, 20, 5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def linear(inputs: int, **outputs: int) -> Linear:
    parts = {name: whole(size) for name, size in outputs.items()}
    made = Linear(whole(inputs), parts, WeightFormat(torch.float32))
    for weight in made.parameters():
        weight.normal_()
    return made


def maps(inputs: int, fuses: bool = True, **outputs: int) -> list[MapOf]:
    product = SharedProduct(linear(inputs, **outputs), list(outputs.values()), fuses=fuses)
    return [MapOf(product, index) for index in range(len(outputs))]


def norm(fuses: bool = True) -> NormOf:
    made = NormOf(torch.randn(SIZE), 1e-5, adds_one=False, fuses=fuses)
    made.prepare()
    return made


def of(rows: Any) -> Tensor:
    return rows.tensor() if isinstance(rows, LaterRows) else rows


class Layer:
    """A layer as modeling code writes it, and its numbers computed one by one."""

    def __init__(self, fuses: bool = True) -> None:
        self.first, self.second = norm(fuses), norm(fuses)
        (self.into,) = maps(SIZE, fuses, o_proj=SIZE)
        self.gate, self.up = maps(SIZE, fuses, gate=INNER, up=INNER)
        (self.down,) = maps(INNER, fuses, down=SIZE)

    def __call__(self, hidden: Any) -> Any:
        residual = hidden
        hidden = self.into(self.first(hidden))
        hidden = residual + hidden
        residual = hidden
        hidden = self.second(hidden)
        hidden = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return residual + hidden

    def one_by_one(self, hidden: Tensor) -> Tensor:
        def normed(x: Tensor, norm: NormOf) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

        hidden = hidden + normed(hidden, self.first) @ self.into.weight.T
        gate_up = normed(hidden, self.second) @ self.gate.weight.T
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden + (F.silu(gate) * up) @ self.down.weight.T


@pytest.mark.parametrize("fuses", [True, False])
def test_two_layers_compute_what_their_code_says(fuses: bool) -> None:
    layers = Layer(fuses), Layer(fuses)
    hidden = wanted = given = torch.randn(1, NUM_ROWS, SIZE)
    before = given.clone()
    for layer in layers:
        hidden, wanted = layer(hidden), layer.one_by_one(wanted)
    torch.testing.assert_close(of(hidden), wanted)
    assert torch.equal(given, before), "what the caller holds stays as it is"


def test_a_layer_is_four_calls_of_products() -> None:
    """Its norms are those of the products, its sums those of the products before them."""
    layer, hidden = Layer(), torch.randn(1, NUM_ROWS, SIZE)
    calls: list[str] = []
    for name in ("of_norm", "gated_mul_of_norm", "add_to"):
        as_it_is = getattr(DenseProduct, name)

        def noted(self: Any, *args: Any, name: str = name, call: Any = as_it_is) -> Any:
            calls.append(name)
            return call(self, *args)

        patch.object(DenseProduct, name, noted).start()
    try:
        of(layer(layer(hidden)))
    finally:
        patch.stopall()
    # gated_mul_of_norm begins with of_norm where there is no kernel for both.
    assert calls.count("gated_mul_of_norm") == 2 and calls.count("add_to") == 4


def test_the_stream_is_not_read_after_something_was_added() -> None:
    layer = Layer()
    stream = layer(torch.randn(1, NUM_ROWS, SIZE))
    later = layer.first(stream)  # its norm, which is not computed yet
    assert isinstance(stream + layer.into(torch.randn(1, NUM_ROWS, SIZE)), LaterRows)
    with pytest.raises(StreamError):
        of(later)
    with pytest.raises(StreamError):
        of(stream)


def test_a_stream_that_was_read_stays_as_it_is() -> None:
    layer = Layer()
    stream = layer(torch.randn(1, NUM_ROWS, SIZE))
    read = of(stream)
    before = read.clone()
    of(stream + layer.into(stream))
    assert torch.equal(read, before) and torch.equal(of(stream), before)


def test_queries_keys_and_values_are_one_product() -> None:
    q, k, v = maps(SIZE, q=8, k=4, v=4)
    x = torch.randn(1, NUM_ROWS, SIZE)
    heads = [each(x).view(1, NUM_ROWS, -1, 4).transpose(1, 2) for each in (q, k, v)]
    assert [part.shape[1] for part in heads] == [2, 1, 1]
    assert heads[1].data_ptr() - heads[0].data_ptr() == 8 * 4  # columns of the same rows
    wanted = x @ q.weight.T
    got = torch.cat([part.transpose(1, 2).flatten(2) for part in heads], dim=-1)
    torch.testing.assert_close(got, wanted)
    # Each call of the first begins anew, also with the same rows.
    again = q(x).tensor()
    torch.testing.assert_close(again, wanted[..., :8])


def test_halves_of_a_packed_map_gate() -> None:
    (packed,) = maps(SIZE, gate_up=2 * INNER)
    (down,) = maps(INNER, down=SIZE)
    x = torch.randn(1, NUM_ROWS, SIZE)
    gate, up = packed(x).chunk(2, dim=-1)
    wanted_gate, wanted_up = (x @ packed.weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(
        of(down(up * F.silu(gate))), (F.silu(wanted_gate) * wanted_up) @ down.weight.T
    )
    # Halves that are used otherwise are computed.
    gate, up = packed(x).chunk(2, dim=-1)
    torch.testing.assert_close(F.silu(up) * gate, F.silu(wanted_up) * wanted_gate)
    torch.testing.assert_close(F.gelu(gate) * up, F.gelu(wanted_gate) * wanted_up)


def test_experts_are_added_to_the_stream() -> None:
    from minisgl.distributed.communicator import SINGLE_RANK

    experts = FusedExperts(4, SIZE, INNER, WeightFormat(torch.float32), SINGLE_RANK)
    for weight in experts.parameters():
        weight.normal_()
    rows, x = torch.randn(1, NUM_ROWS, SIZE), torch.randn(NUM_ROWS, SIZE)
    choice = ByRouter(torch.randn(NUM_ROWS, 4), Routing(2, normalize=True))
    assert len(topk_softmax(*choice)[0]) == NUM_ROWS
    wanted = rows + fused_experts(x, experts.product.experts, choice)
    made = LaterRows(ExpertSum(experts, x, choice, None), (NUM_ROWS,))
    torch.testing.assert_close(of(rows + made.reshape(1, NUM_ROWS, SIZE)), wanted)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x * 2.0,
        lambda x: 2.0 * x,
        lambda x: x / 3.0,
        lambda x: x - 1.0,
        lambda x: 1.0 - x,
        lambda x: -x,
        lambda x: x + torch.ones(SIZE),
        lambda x: torch.tanh(x),
        lambda x: x.float().pow(2).mean(-1, keepdim=True),
        lambda x: torch.where(x > 0, x, torch.zeros(())),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: x[:, 1:],
        lambda x: x.reshape(-1, 4),
        lambda x: x.view(NUM_ROWS, SIZE),
        lambda x: x @ torch.ones(SIZE, 2),
    ],
)
def test_rows_behave_like_a_tensor(operate: Any) -> None:
    (plain,) = maps(SIZE, plain=SIZE)
    x = torch.randn(1, NUM_ROWS, SIZE)
    wanted = x @ plain.weight.T
    rows = plain(x)
    assert rows.shape == wanted.shape and rows.dtype == wanted.dtype and rows.dim() == 3
    torch.testing.assert_close(of(operate(rows)), operate(wanted))
