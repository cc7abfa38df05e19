"""Counts how many tokens take each expert, where the routing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class ExpertTokens(NamedTuple):
    """Tokens that experts have taken; one that chooses 8 of a layer counts 8 times in it."""

    by_rank: tuple[int, ...]  # of the experts of each rank, over all layers
    by_layer: tuple[tuple[int, ...], ...]  # of each expert


class ExpertTally:
    """The tokens of each expert of the layers of a stage, added up over its steps, and which half
    of the tokens each row of a step is of.

    Every rank chooses for all rows, so one of them knows the tokens of all. The counts are on the
    device, where kernels advance them, also in captured steps.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Sequence[int]]],
        num_ranks: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        """ranks: of each layer, as ranks_of of minisgl/expert_copies.py."""
        self._ranks = [torch.tensor(of_layer, dtype=torch.int64).flatten() for of_layer in ranks]
        self._num_ranks = num_ranks
        sizes = [len(of_layer) for of_layer in self._ranks]
        self._counts = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        # Of each layer [2, num_experts]: of rows with even marks, and with odd ones.
        self.layers = [part.view(2, -1) for part in self._counts.split(sizes)]
        # Of the rows of the step that is computed or captured: their KV slots, or others of the
        # same parity, which is that of the position where pages have an even size. Padding has the
        # slots of the scratch page, which is the first one, and is not counted.
        self.marks = self._counts[:0]
        self.first_mark = page_size
        self._reading: torch.cuda.Stream | None = None

    def read(self) -> ExpertTokens:
        """What was counted up to some point of the step in flight. Waits for no step."""
        if self._counts.is_cuda and self._reading is None:
            self._reading = torch.cuda.Stream(self._counts.device)
        with torch.cuda.stream(self._reading):  # without effect on a CPU
            counts = self._counts.cpu()
        by_rank = torch.zeros(self._num_ranks, dtype=torch.int64)
        by_rank.index_add_(0, torch.cat(self._ranks), counts)
        layers = counts.split([len(of_layer) for of_layer in self._ranks])
        return ExpertTokens(
            by_rank=tuple(by_rank.tolist()),
            by_layer=tuple(tuple(part.view(2, -1).sum(0).tolist()) for part in layers),
        )

    def reset(self) -> None:
        """Forget what steps at the start, which serve no request, have counted."""
        self._counts.zero_()
