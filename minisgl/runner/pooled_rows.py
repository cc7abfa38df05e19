"""Vectors of prompts, from the rows of the chunks that compute them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.device.lanes import HostCopy
from minisgl.request import PooledRows, Pooling
from minisgl.runner.computation import Computation
from minisgl.scheduler.plan import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The vectors of a step's chunks, on their way to the host."""

    chunks: tuple[int, ...]  # those that have one, by their index in the plan
    copy: HostCopy  # [num_chunks, n] of each kind of pooling, in the order of `chunks`

    def by_chunk(self) -> dict[int, NDArray[np.float32]]:
        """The vectors by index of the chunk. Waits for the copies."""
        vectors = [vector for tensor in self.copy.wait() for vector in tensor.numpy().copy()]
        return dict(zip(self.chunks, vectors, strict=True))


def pool_rows(plan: StepPlan, hidden: Tensor, computation: Computation) -> PooledVectors | None:
    """Queue what the step adds to the vectors of prompts; None if it adds nothing.

    hidden: of all rows of the step, which has the shape of the plan. Of a mean, a chunk adds the
    sum of its rows.
    """
    kinds: dict[Pooling, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        if chunk.pooling is not None:
            kinds.setdefault(chunk.pooling, []).append(index)
    if not kinds:
        return None
    starts = computation.tables.order.first_rows(plan)
    tensors: list[Tensor] = []
    for pooling, indices in kinds.items():
        rows = [_rows_of(plan.chunks[index], pooling, starts[index]) for index in indices]
        if pooling.rows is PooledRows.MEAN:
            tensors.append(
                torch.stack([hidden[each.start : each.stop].float().sum(0) for each in rows])
            )
            continue
        (places,) = computation.lanes.upload([[each.start for each in rows]])
        vectors = hidden[places]
        if pooling.token_ids:
            (token_ids,) = computation.lanes.upload([pooling.token_ids])
            vectors = computation.whole_logits(vectors)[:, token_ids]
        tensors.append(vectors.float())
    order = tuple(index for indices in kinds.values() for index in indices)
    return PooledVectors(order, computation.lanes.download(tensors))


def _rows_of(chunk: Chunk, pooling: Pooling, first: int) -> range:
    """The pooled rows of a chunk that begins with row `first` of the step."""
    end = first + len(chunk.token_ids)
    if pooling.rows is PooledRows.LAST:
        return range(end - 1, end)
    if pooling.rows is PooledRows.FIRST:
        return range(first, first + 1)
    return range(first + max(0, pooling.num_skipped - chunk.start), end)
