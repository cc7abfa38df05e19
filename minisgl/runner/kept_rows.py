"""Counts, on the device, the rows that the states of slots lack."""

from __future__ import annotations

import torch
from torch import Tensor


class KeptRows:
    """Of a model whose layers keep the rows of a run until it is known which count (`Runs`)."""

    def __init__(self, lengths: Tensor, *, has_any: bool) -> None:
        """lengths: of SlotState. has_any: False for a model that keeps none."""
        # The number of tokens by which the state of a slot has advanced.
        self._covered = torch.zeros_like(lengths) if has_any else None

    def advance(self, slots: Tensor, positions: Tensor, run: int) -> Tensor | None:
        """The number of kept rows that count, [num_runs] int32, in a step of runs of `run` rows;
        None if none is ever kept.

        slots: [num_runs] int64; positions: [num_runs · run] int64, of the rows.
        """
        if self._covered is None:
            return None
        first = positions[::run].int()
        num_kept = first - self._covered[slots]
        self._covered[slots] = first + (run == 1)
        return num_kept

    def cover(self, slots: Tensor, ends: Tensor) -> None:
        """Note that a chunk ends at `ends` in each of `slots`, both [num_chunks] int64."""
        if self._covered is not None:
            self._covered[slots] = ends.int()
