"""Attention that ranks divide by requests: each computes the rows of its own, with all heads.

Of the rows of a step, those of a rank follow one another, in the order of the ranks. The stream is
the same on all ranks. A rank takes its part of it, lets the layer's attention add to it as if it
was alone, and the ranks gather the parts. So attention itself, and what it keeps, knows nothing of
other ranks.

Few rows are gathered as a sum of rows that are zeros on all ranks but one. That is exact, and takes
one exchange, which computes the next norm as well, where a gathering takes three kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.residual import Residual, joined
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step

FEW_ROWS = 128  # of all ranks, that are gathered as a sum


def mixed(
    mixer: nn.Module, residual: Residual, norm: RMSNorm, step: Step, ranks: Communicator
) -> Residual:
    """The stream with the output of `mixer` added, a module through which rows see others. norm: of
    its input. ranks: of the stage."""
    if not step.batch.shares:
        added: Residual = mixer(residual, norm, step)
        return added
    own = own_rows(joined(residual, norm), step, ranks)
    if len(own):
        own = joined(mixer(Residual(own), norm, step), norm)
    return stream_of_all(own, step.batch.shares, ranks)


def mixed_apart(
    mixer: Callable[[Residual, RMSNorm, Step], tuple[Tensor, Tensor]],
    residual: Residual,
    norm: RMSNorm,
    step: Step,
    ranks: Communicator,
) -> tuple[Tensor, Tensor]:
    """The output of `mixer`, and the stream without it: both [num_rows, size]."""
    if not step.batch.shares:
        return mixer(residual, norm, step)
    rows = joined(residual, norm)
    output = own = own_rows(rows, step, ranks)
    if len(own):
        output, _ = mixer(Residual(own), norm, step)
    return of_all(output, step.batch.shares, ranks), rows


def own_rows(rows: Tensor, step: Step, ranks: Communicator) -> Tensor:
    """Of the rows of all ranks those of this one, a view."""
    shares = step.batch.shares
    first = sum(shares[: ranks.rank])
    return rows[first : first + shares[ranks.rank]]


def stream_of_all(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Residual:
    """As `of_all`; the rows are those of the stream, and a norm of it follows."""
    if sum(shares) > FEW_ROWS:
        return Residual(gathered(own, shares, ranks))
    summand = placed(own, shares, ranks)
    summed = partial(ranks.all_reduce_norm, summand)
    return Residual(torch.zeros_like(summand), pending=summed)


def of_all(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The rows of all ranks, [sum(shares), size], of which rank r has shares[r]."""
    if sum(shares) > FEW_ROWS:
        return gathered(own, shares, ranks)
    return ranks.all_reduce(placed(own, shares, ranks))


def placed(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The rows of this rank in their places among those of all, which are zeros."""
    rows = own.new_zeros((sum(shares), own.shape[1]))
    first = sum(shares[: ranks.rank])
    rows[first : first + len(own)] = own
    return rows


def gathered(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """As `of_all`, for any number of rows.

    Parts are gathered as if all were as long as the longest; what fills them up is dropped.
    """
    longest, size = max(shares), own.shape[1]
    part = own
    if len(own) < longest:
        part = own.new_empty((longest, size))
        part[: len(own)] = own
    rows = ranks.all_gather(part.reshape(1, -1)).view(-1, size)
    if len(rows) == sum(shares):
        return rows
    return torch.cat([rows[i * longest : i * longest + n] for i, n in enumerate(shares)])
