"""Linear maps and the embedding, of which a tensor-parallel rank may hold a part. Weights are
allocated uninitialised; the loader fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels import dispatch
from minisgl.kernels.dispatch import LinearKernels, Residual
from minisgl.shards import Shard, whole


def empty_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b. x: [num_rows, inputs]; returns [num_rows, outputs].

    `inputs` and `outputs` are the rank's own: it computes a part of y, or a summand of all of y.
    """

    kernels: LinearKernels | None = None  # see share_kernels

    def __init__(self, inputs: Shard, outputs: Shard, *, bias: bool = False) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.weight = empty_weight(outputs.size, inputs.size)
        self.bias = empty_weight(outputs.size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.linear(x, self.weight, self.bias, self.kernels)


class MergedLinear(Linear):
    """Several linear maps of one input as one product; the outputs lie side by side.

    `parts` gives the name that each map has in a checkpoint and the rank's part of its outputs.
    """

    def __init__(self, inputs: Shard, parts: Mapping[str, Shard], *, bias: bool = False) -> None:
        super().__init__(inputs, whole(sum(part.size for part in parts.values())), bias=bias)
        self.parts = dict(parts)


class SummedLinear(Linear):
    """The map at the end of a block, whose inputs are split over the ranks: each has a summand of
    the result. The bias is in the summand of rank 0 alone; the others' is zero."""

    def __init__(
        self, inputs: Shard, out_features: int, ranks: Communicator, *, bias: bool = False
    ) -> None:
        super().__init__(inputs, whole(out_features), bias=bias)
        self._ranks = ranks

    @property
    def holds_bias(self) -> bool:
        return self._ranks.rank == 0

    def add(self, x: Tensor, rows: Tensor) -> Residual:
        """rows + y, which may be written over `rows`: [num_rows, out_features]."""
        if self._ranks.size == 1:
            return dispatch.linear_add(x, self.weight, self.bias, rows, self.kernels)
        mailbox = self._ranks.mailbox(len(x))
        sent = mailbox and dispatch.linear_send(x, self.weight, self.bias, mailbox, self.kernels)
        return Residual(rows, pending=sent or partial(self._ranks.sum_norm, self(x)))


class Embedding(nn.Module):
    """Row `id` of the table for each id. token_ids: [n]; returns [n, hidden_size]."""

    kernels: LinearKernels | None = None  # for when the table is also the head

    def __init__(self, vocab: Shard, hidden_size: int, ranks: Communicator) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = empty_weight(vocab.size, hidden_size)
        self._ranks = ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        part = dispatch.embed(token_ids, self.weight, self.vocab.first)
        return part if self._ranks.size == 1 else self._ranks.sum(part)


def share_kernels(model: nn.Module) -> None:
    """Let the linear maps of a model, whose weights have their dtype and device, use the kernels
    that there are for these. They run one at a time, and so share what memory these need."""
    modules = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
    kernels = dispatch.linear_kernels([module.weight for module in modules])
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
