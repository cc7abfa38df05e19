"""The modules that minisgl puts into a model of transformers, each in the place of one.

Each computes what it stands for. What they return to the modeling code is described in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.kernels import dispatch
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.reference import ByRouter, Choice, Chosen, Routing, choose
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.experts import FusedExperts
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.adopted.rows import (
    Call,
    Columns,
    ExpertSum,
    Later,
    LaterRows,
    Norm,
    Output,
    Stream,
    computed,
    rows_now,
    rows_of,
)
from minisgl.shards import whole


class SharedProduct:
    """The product of linear maps that multiply the same rows."""

    def __init__(
        self,
        linear: Linear,
        sizes: Sequence[int],
        *,
        fuses: bool,
        note: Callable[[Tensor], None] = lambda y: None,
    ) -> None:
        """sizes: the number of outputs of each map. fuses: rows may be returned that are not
        computed yet. note: called with each product that is computed by itself."""
        self.linear, self._sizes, self._fuses, self._note = linear, sizes, fuses, note
        self._call: Call | None = None  # whose outputs are not all taken
        self._x: Any = None  # its rows
        self._left: set[int] = set()

    def __call__(self, x: Any, index: int, rows: Rows | None = None) -> Any:
        """The outputs of the map with this index for x, [..., inputs]. rows: as of Call."""
        if len(self._sizes) == 1:
            made = LaterRows(Output(self.linear, rows_of(x), rows, self._note), x.shape[:-1])
        else:
            made = LaterRows(self._columns(x, index, rows), x.shape[:-1])
        return made if self._fuses else made.tensor()

    def _columns(self, x: Any, index: int, rows: Rows | None) -> Columns:
        same = x.node if isinstance(x, LaterRows) else x
        call = self._call
        if call is None or same is not self._x or index not in self._left:
            call = self._call = Call(self.linear, rows_of(x), rows, self._note)
            self._x, self._left = same, set(range(len(self._sizes)))
        self._left.discard(index)
        if not self._left:
            self._call = self._x = None
        return Columns(call, sum(self._sizes[:index]), self._sizes[index])


class MapOf(nn.Module):
    """Stands for a linear map."""

    def __init__(self, product: SharedProduct, index: int = 0) -> None:
        super().__init__()
        self._product, self._index = product, index

    @property
    def linear(self) -> Linear:
        """What computes it, perhaps with other maps of the same rows."""
        return self._product.linear

    @property
    def weight(self) -> Tensor:
        """Of the product, in which the maps of the same rows are one."""
        return self.linear.product.weights["weight"]

    def forward(self, x: Any) -> Any:
        return self._product(x, self._index, rows_now(self))


class Weights(NamedTuple):
    """The weights of a norm, as its kernels take them."""

    weight: Tensor
    eps: float


class NormOf(nn.Module):
    """Stands for an RMS norm."""

    weight: nn.Parameter | None  # [size]; None: nothing multiplies

    def __init__(self, weight: Tensor | None, eps: float, *, adds_one: bool, fuses: bool) -> None:
        """adds_one: 1 + weight multiplies. fuses: rows may be returned that are not computed."""
        super().__init__()
        self.eps, self.adds_one, self._fuses = eps, adds_one, fuses
        self.weight, self._weights = None, None
        if weight is not None:
            self.weight = nn.Parameter(weight, requires_grad=False)
            self._weights = Weights(self.weight, eps)
        # Asked for the norm of heads, whether the attention of the layer will compute it.
        self.defers: Callable[[Tensor, NormOf], bool] = lambda heads, norm: False

    def prepare(self) -> None:
        """Make what the kernels read of the weight, which is filled."""
        if self.adds_one and self.weight is not None:
            self._weights = Weights(1 + self.weight.float(), self.eps)

    def refresh(self) -> None:
        """Make it again, in place, of a weight that was filled again."""
        if self.adds_one and self.weight is not None and self._weights is not None:
            self._weights.weight.copy_(1 + self.weight.float())

    def weights_for(self, x: Any) -> Weights:
        """What the kernels read to norm rows like x."""
        if self._weights is None:
            ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
            self._weights = Weights(ones, self.eps)
        return self._weights

    def forward(self, x: Any) -> Any:
        if x.dim() == 4:  # heads
            heads: Tensor = x.tensor() if isinstance(x, Later) else x
            if self.defers(heads, self):
                return heads
            rows = heads.reshape(-1, heads.shape[-1]).contiguous()
            return dispatch.rms_norm(rows, *self.weights_for(rows)).view(heads.shape)
        stream = rows_of(x)
        if not isinstance(stream, Stream):
            stream = Stream(Residual(computed(stream).contiguous()), is_shared=True)
        made = LaterRows(Norm(stream, self.weights_for(x)), x.shape[:-1])
        return made if self._fuses else made.tensor()


class Picked(Later):
    """The experts that a router chooses, or their weights: [num_rows, top_k]."""

    def __init__(self, choice: ByRouter, place: int) -> None:
        """place: 0 of the experts, 1 of the weights."""
        self.choice, self._place = choice, place

    def tensor(self) -> Tensor:
        experts, weights, _ = choose(self.choice)
        return weights if self._place else experts.long()


class RouterOf(Linear):
    """Stands for a router that chooses by a softmax."""

    def __init__(
        self, name: str, num_experts: int, size: int, dtype: torch.dtype, routing: Routing
    ) -> None:
        super().__init__(whole(size), {name: whole(num_experts)}, WeightFormat(dtype))
        self.routing, self.fuses = routing, False

    def forward(self, x: Any, rows: Rows | None = None) -> Any:
        """Returns the logits, the weights of the chosen experts, and which these are."""
        node, rows = rows_of(x), rows or rows_now(self)
        if isinstance(node, Norm):
            logits = node.product(self.product, rows, keeps=True)
        else:
            logits = self.product(computed(node), rows)
        choice = ByRouter(logits, self.routing)
        weights, experts = Picked(choice, 1), Picked(choice, 0)
        if self.fuses:
            return logits, weights, experts
        return logits, weights.tensor(), experts.tensor()


class ExpertsOf(FusedExperts):
    """Stands for the experts of a layer."""

    fuses = False
    transposed = False  # as of ExpertKind

    def forward(self, x: Any, experts: Any, weights: Any) -> Any:
        """x: [num_rows, hidden_size]; experts and weights: [num_rows, top_k]."""
        inputs = computed(rows_of(x))
        total = ExpertSum(self, inputs, _choice(experts, weights, inputs), rows_now(self))
        made = LaterRows(total, x.shape[:-1])
        return made if self.fuses else made.tensor()


def _choice(experts: Any, weights: Any, rows: Tensor) -> Choice:
    choices = [x.choice for x in (experts, weights) if isinstance(x, Picked)]
    if len(choices) == 2 and choices[0] is choices[1]:
        return choices[0]
    ids, shares = (x.tensor() if isinstance(x, Later) else x for x in (experts, weights))
    return Chosen(ids.int().contiguous(), shares.to(rows.dtype).contiguous())


class HeadOf(nn.Module):
    """Stands for a head that is the embedding."""

    def __init__(self, product: DenseProduct) -> None:
        super().__init__()
        self.product: Product = product
        if product.bias is not None:
            self.bias = nn.Parameter(product.bias, requires_grad=False)

    def forward(self, x: Any) -> Tensor:
        rows = computed(rows_of(x))
        return self.product(rows).view(*x.shape[:-1], -1)
