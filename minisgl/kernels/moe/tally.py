"""Counts how many tokens take each expert, where the routing is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.shards import uneven_shard


class ExpertTally:
    """The tokens of each expert, added up over the layers and the steps of a rank.

    Every rank chooses for all rows, so one of them knows the tokens of all. The counts are on the
    device, where kernels advance them, also in captured steps.
    """

    def __init__(self, num_experts: int, page_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        # The KV slots of the rows of the step that is computed or captured. Padding has the slots
        # of the scratch page, which is the first one, and is not counted.
        self.kv_slots = self.counts[:0]
        self.first_slot = page_size
        self._reading: torch.cuda.Stream | None = None

    def add(self, experts: Tensor) -> None:
        """Count the choices of the step's rows: [num_rows, top_k], of all ranks' experts."""
        is_real = (self.kv_slots >= self.first_slot).long()
        self.counts.index_add_(
            0, experts.flatten().long(), is_real.repeat_interleave(experts.shape[1])
        )

    def by_rank(self, num_ranks: int) -> tuple[int, ...]:
        """The tokens of the experts of each rank, up to some point of the step in flight. Waits for
        no step."""
        if self.counts.is_cuda and self._reading is None:
            self._reading = torch.cuda.Stream(self.counts.device)
        with torch.cuda.stream(self._reading):  # without effect on a CPU
            counts = self.counts.tolist()
        parts = (uneven_shard(len(counts), rank, num_ranks) for rank in range(num_ranks))
        return tuple(sum(counts[part.first :][: part.size]) for part in parts)

    def reset(self) -> None:
        """Forget what steps at the start, which serve no request, have counted."""
        self.counts.zero_()
