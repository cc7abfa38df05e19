"""The runner's half: vectors of prompts, from the rows of the chunks that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.device.lanes import HostCopy, Lanes
from minisgl.parts.device_part import StepPart
from minisgl.parts.vectors.host import PooledChunk, VectorPlan
from minisgl.pooling import PooledRows, Pooling


class VectorStep(StepPart):
    def __init__(
        self, lanes: Lanes, whole_logits: Callable[[Tensor], Tensor], plan: VectorPlan
    ) -> None:
        """whole_logits: of rows of hidden states, over the whole vocabulary."""
        self._lanes = lanes
        self._whole_logits = whole_logits
        self._of_kind: dict[Pooling, list[PooledChunk]] = {}
        for chunk in plan.chunks:
            self._of_kind.setdefault(chunk.pooling, []).append(chunk)
        self._copy: HostCopy | None = None  # [num_chunks, n] of each kind

    def read_rows(self, hidden: Tensor, first_rows: Sequence[int]) -> None:
        """Of a mean, a chunk adds the sum of its rows."""
        tensors: list[Tensor] = []
        for pooling, chunks in self._of_kind.items():
            rows = [_rows_of(chunk, first_rows[chunk.index]) for chunk in chunks]
            if pooling.rows is PooledRows.MEAN:
                sums = [hidden[each.start : each.stop].float().sum(0) for each in rows]
                tensors.append(torch.stack(sums))
                continue
            (places,) = self._lanes.upload([[each.start for each in rows]])
            vectors = hidden[places]
            if pooling.token_ids:
                (token_ids,) = self._lanes.upload([pooling.token_ids])
                vectors = self._whole_logits(vectors)[:, token_ids]
            tensors.append(vectors.float())
        self._copy = self._lanes.download(tensors)

    def outcome(self) -> dict[int, NDArray[np.float32]]:
        """The vectors by index of the chunk."""
        if self._copy is None:
            return {}
        vectors = [vector for tensor in self._copy.wait() for vector in tensor.numpy().copy()]
        chunks = [chunk.index for chunks in self._of_kind.values() for chunk in chunks]
        return dict(zip(chunks, vectors, strict=True))


def _rows_of(chunk: PooledChunk, first: int) -> range:
    """The pooled rows of a chunk that begins with row `first` of the step."""
    end = first + chunk.num_rows
    match chunk.pooling.rows:
        case PooledRows.LAST:
            return range(end - 1, end)
        case PooledRows.FIRST:
            return range(first, first + 1)
        case PooledRows.MEAN:
            return range(first + max(0, chunk.pooling.num_skipped - chunk.start), end)
