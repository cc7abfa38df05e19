"""Rows of a step that are computed when it is known what for.

transformers' modeling code asks for one operation after another: a sum, its norm, a product of the
norm, an activation. minisgl's kernels do several of these at once. So the modules that minisgl puts
into a model return `LaterRows`. They behave like a tensor, and are computed as soon as something is
asked of them that is not known here. Known are: adding to the residual stream, its norm, products
of that norm, and the gating of an MLP.

The stream is added to in place. What asks for it as it was before gets a StreamError, and never
wrong numbers. The code of a model does the same in every step, so its proof finds that out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.kernels import dispatch
from minisgl.kernels.linear.product import Product
from minisgl.kernels.moe.reference import Choice
from minisgl.kernels.residual import NormWeights, Residual, norm
from minisgl.kernels.rows import Rows
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear


class StreamError(RuntimeError):
    """The residual stream is asked for as it was before something was added to it."""


SEAT = "minisgl_seat"  # the attribute of modules with what answers the calls of attention


def rows_now(module: nn.Module) -> Rows | None:
    """What the step says of the rows that pass through a module; None outside of a step."""
    rows: Rows | None = getattr(module.__dict__.get(SEAT), "rows", None)
    return rows


def _nothing(y: Tensor) -> None:
    pass


# -- how rows are computed -------------------------------------------------------------------------


class Node(ABC):
    """Some rows, [num_rows, size], and how they are computed, at most once."""

    def __init__(self, num_rows: int, size: int, like: Tensor) -> None:
        """like: a tensor with the dtype and the device of the rows."""
        self.num_rows, self.size, self.like = num_rows, size, like
        self._value: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    def value(self) -> Tensor:
        if self._value is None:
            self._value = self.compute()
        return self._value

    @abstractmethod
    def compute(self) -> Tensor: ...


class Addend(Node):
    """Rows that can be added to the stream while they are computed."""

    @abstractmethod
    def begin(self) -> None:
        """Compute what they need of the stream as it is before."""
        ...

    @abstractmethod
    def add_to(self, stream: Tensor) -> Residual:
        """The stream with these added. May overwrite it."""
        ...


class Stream(Node):
    """The residual stream."""

    def __init__(self, residual: Residual, *, is_shared: bool = False) -> None:
        """is_shared: something else may hold its tensor, which must stay as it is."""
        num_rows, size = residual.rows.shape
        super().__init__(num_rows, size, residual.rows)
        self._residual: Residual | None = residual
        self._is_shared = is_shared

    @property
    def residual(self) -> Residual:
        if self._residual is None:
            raise StreamError("the residual stream is read after something was added to it")
        return self._residual

    def is_joined(self, rows: Tensor) -> None:
        """Note that `rows` are the whole stream, as a norm has joined it."""
        self._residual = Residual(rows)

    def compute(self) -> Tensor:
        self._is_shared = True
        return self._join()

    def add(self, addend: Node | Tensor) -> Stream:
        """The stream with `addend`, in the place of this one."""
        if isinstance(addend, Addend) and not addend.is_computed:
            addend.begin()
            return Stream(addend.add_to(self._take()))
        delta = computed(addend).contiguous()
        if self._is_shared:
            return Stream(Residual(self._join() + delta))
        return Stream(Residual(self._take(), delta=delta))

    def _take(self) -> Tensor:
        """The whole stream, which may be overwritten: it is another one's from now on."""
        rows = self._join()
        if self._is_shared:
            return rows.clone()
        self._residual = None
        return rows

    def _join(self) -> Tensor:
        rows, delta, _, pending = self.residual
        if pending is not None:
            _, rows = pending(rows, torch.ones_like(rows[0]), 1.0)
        elif delta is not None:
            rows = rows + delta
        self.is_joined(rows)
        return rows


class Norm(Node):
    """The RMS norm of the stream."""

    def __init__(self, stream: Stream, weights: NormWeights) -> None:
        super().__init__(stream.num_rows, stream.size, stream.like)
        self._stream, self._weights = stream, weights

    def compute(self) -> Tensor:
        normed, rows = norm(self._stream.residual, self._weights)
        self._stream.is_joined(rows)
        return normed

    def product(self, product: Product, rows: Rows | None, *, keeps: bool = False) -> Tensor:
        """y for x the norm. keeps: the norm itself is needed, too."""
        if self.is_computed:
            return product(self.value(), rows)
        residual, weights = self._stream.residual, self._weights
        if keeps:
            self._value, y, stream = product.of_kept_norm(residual, weights, rows)
        else:
            y, stream = product.of_norm(residual, weights, rows)
        self._stream.is_joined(stream)
        return y

    def gated(self, gate_up: Product, after: Product, rows: Rows | None) -> Any:
        """silu(gate) · up for x the norm, as an x of the product `after`."""
        if self.is_computed:
            return after.gated_mul(gate_up(self.value(), rows), rows)
        residual, weights = self._stream.residual, self._weights
        hidden, stream = gate_up.gated_mul_of_norm(residual, weights, after, rows)
        self._stream.is_joined(stream)
        return hidden


class Call(Node):
    """The product of some rows; several linear maps may have their outputs in its columns."""

    def __init__(
        self,
        linear: Linear,
        x: Node | Tensor,
        rows: Rows | None,
        note: Callable[[Tensor], None] = _nothing,
    ) -> None:
        """rows: what the step says of those of x. note: called with y when it is computed by
        itself."""
        super().__init__(_num_rows(x), linear.num_outputs, _like(x))
        self.linear, self.x, self.rows = linear, x, rows
        self._note = note
        self._input: Any = None  # x as the product takes it

    def begin(self) -> None:
        if isinstance(self.x, Gated) and not self.x.is_computed:
            self._input = self.x.call.gated(self.linear.product)
        else:
            self._input = computed(self.x)

    def compute(self) -> Tensor:
        product, x = self.linear.product, self.x
        if isinstance(x, Norm):
            y = x.product(product, self.rows)
        else:
            self.begin()
            y = product(self._input, self.rows)
        self._note(y)
        return y

    def gated(self, after: Product) -> Any:
        """silu(gate) · up, whose gates are the first half of y, as an x of the product `after`."""
        if isinstance(self.x, Norm) and not self.is_computed:
            return self.x.gated(self.linear.product, after, self.rows)
        return after.gated_mul(self.value(), self.rows)


class Columns(Node):
    """Columns of a product, from `first` on."""

    def __init__(self, call: Call, first: int, size: int) -> None:
        super().__init__(call.num_rows, size, call.like)
        self.call, self.first = call, first

    def compute(self) -> Tensor:
        return self.call.value()[:, self.first : self.first + self.size]


class Gates(Node):
    """silu of the first half of the columns of a product."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.num_rows, call.size // 2, call.like)
        self.call = call

    def compute(self) -> Tensor:
        return F.silu(self.call.value()[:, : self.size])


class Gated(Node):
    """silu(gate) · up of a product whose columns are the gates, then what they multiply."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.num_rows, call.size // 2, call.like)
        self.call = call

    def compute(self) -> Tensor:
        return dispatch.gated_mul(self.call.value())


class Output(Call, Addend):
    """The outputs of one linear map, summed over the ranks."""

    def compute(self) -> Tensor:
        return self.linear.summed(super().compute())

    def add_to(self, stream: Tensor) -> Residual:
        return self.linear.add_to(self._input, stream, self.rows)


class ExpertSum(Addend):
    """The weighted sum over each row's experts."""

    def __init__(self, experts: FusedExperts, x: Tensor, choice: Choice, rows: Rows | None) -> None:
        num_rows, size = x.shape
        super().__init__(num_rows, size, x)
        self._experts, self._x, self._choice, self._rows = experts, x, choice, rows

    def begin(self) -> None:
        """Nothing: `x` is computed."""

    def compute(self) -> Tensor:
        return self._experts.summed(self._x, self._choice, self._rows)

    def add_to(self, stream: Tensor) -> Residual:
        return self._experts.add_to(self._x, self._choice, stream, self._rows)


def computed(x: Node | Tensor) -> Tensor:
    return x.value() if isinstance(x, Node) else x


def _num_rows(x: Node | Tensor) -> int:
    return x.num_rows if isinstance(x, Node) else len(x)


def _like(x: Node | Tensor) -> Tensor:
    return x.like if isinstance(x, Node) else x


# -- what the modeling code sees -------------------------------------------------------------------


class Later(ABC):
    """Behaves like a tensor, which is computed when something is asked of it."""

    @abstractmethod
    def tensor(self) -> Tensor: ...

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        known = _KNOWN.get(getattr(func, "__name__", ""))
        if known is not None and all(option is False for option in options.values()):
            rows = known(*args)
            if rows is not None:
                return rows
        return func(*_now(list(args)), **{name: _now(value) for name, value in options.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __iter__(self) -> Any:
        return iter(self.tensor())

    def __len__(self) -> int:
        return len(self.tensor())


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Later, *others: Any) -> Any:
        known = _KNOWN.get(name)
        rows = None if known is None else known(self, *others)
        return getattr(self.tensor(), name)(*map(_now, others)) if rows is None else rows

    return operate


for _name in """add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg abs invert
        gt ge lt le float int""".split():
    setattr(Later, f"__{_name}__", _operator(f"__{_name}__"))


class LaterRows(Later):
    """The rows of a node as a tensor [*lead, size]."""

    def __init__(self, node: Node, lead: Sequence[int]) -> None:
        """lead: the shape without the last dimension."""
        self.node, self.lead = node, torch.Size(lead)

    def tensor(self) -> Tensor:
        return self.node.value().view(self.shape)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, self.node.size))

    @property
    def dtype(self) -> torch.dtype:
        return self.node.like.dtype

    @property
    def device(self) -> torch.device:
        return self.node.like.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def view(self, *shape: Any) -> Any:
        """In another shape; not computed if the rows are the same."""
        wanted = shape if isinstance(shape[0], int) else tuple(shape[0])
        if -1 in wanted:
            rest = self.shape.numel() // -torch.Size(wanted).numel()
            wanted = tuple(rest if length == -1 else length for length in wanted)
        if wanted[-1] == self.node.size:
            return LaterRows(self.node, wanted[:-1])
        return self.tensor().view(wanted)

    reshape = view

    def contiguous(self) -> LaterRows:
        return self

    def chunk(self, chunks: int, dim: int = 0) -> Sequence[Any]:
        """The halves of the outputs of a linear map are not computed before they are needed."""
        node = self.node
        if chunks == 2 and dim in (-1, len(self.lead)) and isinstance(node, Output):
            call, half = Call(node.linear, node.x, node.rows), node.size // 2
            return [LaterRows(Columns(call, first, half), self.lead) for first in (0, half)]
        return self.tensor().chunk(chunks, dim)


def rows_of(x: Any) -> Node | Tensor:
    """The rows of a tensor or of LaterRows: [num_rows, size]."""
    if isinstance(x, LaterRows):
        return x.node
    tensor: Tensor = _now(x)
    return tensor.reshape(-1, tensor.shape[-1])


def _now(value: Any) -> Any:
    """`value`, with a tensor in the place of each Later."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_now, value))
    return value.tensor() if isinstance(value, Later) else value


def _added(a: Any, b: Any) -> LaterRows | None:
    """To a stream, or to a tensor, which becomes one."""
    if not (isinstance(a, Later | Tensor) and isinstance(b, Later | Tensor)):
        return None
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    for one, other in ((a, b), (b, a)):
        if isinstance(one, LaterRows) and isinstance(one.node, Stream):
            return LaterRows(one.node.add(rows_of(other)), one.lead)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor) and isinstance(other, LaterRows):
            stream = Stream(Residual(one.reshape(-1, one.shape[-1])), is_shared=True)
            return LaterRows(stream.add(other.node), other.lead)
    return None


def _silu(x: Any) -> LaterRows | None:
    node = x.node if isinstance(x, LaterRows) else None
    if isinstance(node, Columns) and not node.first and 2 * node.size == node.call.size:
        return LaterRows(Gates(node.call), x.lead)
    return None


def _multiplied(a: Any, b: Any) -> LaterRows | None:
    nodes = [x.node for x in (a, b) if isinstance(x, LaterRows)]
    for gates, ups in (nodes, nodes[::-1]) if len(nodes) == 2 else ():
        if isinstance(gates, Gates) and isinstance(ups, Columns) and ups.call is gates.call:
            return LaterRows(Gated(gates.call), a.lead) if ups.first == gates.size else None
    return None


_KNOWN: dict[str, Callable[..., LaterRows | None]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _added),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _multiplied),
    "silu": _silu,
}
