"""Attention that ranks divide by requests: each computes the rows of its own, with all heads.

Of the rows of a step, those of a rank follow one another, in the order of the ranks. The stream is
the same on all ranks. A rank takes its part of it, lets the layer's attention add to it as if it
was alone, and the ranks gather the parts. So attention itself, and what it keeps, knows nothing of
other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.residual import Residual, joined
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step


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
    return Residual(gathered(own, step.batch.shares, ranks))


def mixed_apart(
    mixer: nn.Module, residual: Residual, norm: RMSNorm, step: Step, ranks: Communicator
) -> tuple[Tensor, Tensor]:
    """The output of `mixer`, and the stream without it: both [num_rows, size]."""
    if not step.batch.shares:
        output, rows = mixer(residual, norm, step)
        return output, rows
    rows = joined(residual, norm)
    output = own = own_rows(rows, step, ranks)
    if len(own):
        output, _ = mixer(Residual(own), norm, step)
    return gathered(output, step.batch.shares, ranks), rows


def own_rows(rows: Tensor, step: Step, ranks: Communicator) -> Tensor:
    """Of the rows of all ranks those of this one, a view."""
    shares = step.batch.shares
    first = sum(shares[: ranks.rank])
    return rows[first : first + shares[ranks.rank]]


def gathered(own: Tensor, shares: Sequence[int], ranks: Communicator) -> Tensor:
    """The rows of all ranks, [sum(shares), size], of which rank r has shares[r].

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
