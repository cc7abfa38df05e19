"""Linear layers and the embedding, of which a tensor-parallel rank may hold a part.

Each linear layer owns a product (kernels/linear/product.py) and registers its weights as
parameters. They are uninitialised; the loader fills them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.formats import WeightFormat, num_rows
from minisgl.shards import Shard, whole


def parameter(weight: Tensor) -> nn.Parameter:
    """A parameter that shares the memory of `weight`."""
    return nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True, slots=True)
class MergedMap:
    """A map of a checkpoint that has the outputs of several parts of a product.

    They follow one another, or interleave: each of the heads has some of the outputs of each part,
    one part after the other.
    """

    name: str
    parts: tuple[str, ...]
    num_heads: int = 1  # of all ranks together


class Linear(nn.Module):
    """y = x Wᵀ + b. x: [num_rows, inputs.size]; several maps of one x are one product, their
    outputs columns of y side by side.

    `parts`: the name of each map in a checkpoint, within the module of `format`, and what this rank
    holds of its outputs. `inputs`: what it holds of those. Unless all are whole, it computes a part
    of the columns of y, or a summand of all. `merged`: the maps of a checkpoint that are several of
    the parts.
    """

    def __init__(
        self,
        inputs: Shard,
        parts: Mapping[str, Shard],
        format: WeightFormat,
        *,
        bias: bool = False,
        merged: Sequence[MergedMap] = (),
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts = dict(parts)
        self.merged = tuple(merged)
        # Which format a map has depends on its name in the checkpoint.
        names = {part: each.name for each in merged for part in each.parts}
        of_parts = dict.fromkeys(names.get(part, part) for part in parts)
        self.product = format.product(of_parts, list(parts.values()), inputs, bias=bias)
        self.register_weights()

    @property
    def num_outputs(self) -> int:
        """The number of columns of y that this rank computes."""
        return num_rows(self.parts.values())

    def register_weights(self) -> None:
        """Make the product's weights parameters, again where it has let go of some."""
        for name, weight in self.product.weights.items():
            self.register_parameter(name, parameter(weight))

    def replace_product(self, product: Product) -> None:
        """Take another product, and let go of the weights of the one before."""
        self._parameters.clear()
        self.product = product
        self.register_weights()

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.product(x, rows)

    def summed(self, y: Tensor) -> Tensor:
        """y of all ranks together. May overwrite y."""
        return y

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows | None) -> Residual:
        """The stream with y added. May overwrite it: [num_rows, outputs]."""
        return self.product.add_to(x, stream, rows)


class RowParallelLinear(Linear):
    """The linear map at the end of a block. Its inputs are split over the ranks, each of which has
    a summand of the result. The bias is part of rank 0's summand; the other ranks' is zero."""

    def __init__(
        self,
        name: str,
        inputs: Shard,
        out_features: int,
        format: WeightFormat,
        comm: Communicator,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(inputs, {name: whole(out_features)}, format, bias=bias)
        self._comm = comm

    @property
    def holds_bias(self) -> bool:
        return self._comm.rank == 0

    def summed(self, y: Tensor) -> Tensor:
        return y if self._comm.size == 1 else self._comm.all_reduce(y)

    def add_to(self, x: Tensor, stream: Tensor, rows: Rows | None) -> Residual:
        """The stream with y of all ranks together added. May overwrite it."""
        if self._comm.size == 1:
            return super().add_to(x, stream, rows)
        mailbox = self._comm.mailbox(len(x))
        sent = mailbox and self.product.send(x, mailbox, rows)
        return Residual(stream, pending=sent or partial(self._comm.all_reduce_norm, self(x, rows)))


class VocabParallelEmbedding(nn.Module):
    """Row `id` of the table for each id, times `scale`, a number of the table's dtype, if there is
    one. token_ids: [n]; returns [n, hidden_size]."""

    def __init__(
        self, vocab: Shard, hidden_size: int, dtype: torch.dtype, comm: Communicator
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.scale: float | None = None
        self.weight = parameter(torch.empty((vocab.size, hidden_size), dtype=dtype))
        self._comm = comm

    def forward(self, token_ids: Tensor) -> Tensor:
        part = dispatch.embed(token_ids, self.weight, self.vocab.first)
        rows = part if self._comm.size == 1 else self._comm.all_reduce(part)
        return rows if self.scale is None else rows.mul_(self.scale)
