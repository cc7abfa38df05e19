"""Selects what chooses among the experts of a rank, and how a shared one is computed."""

from __future__ import annotations

import torch

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.moe import reference
from minisgl.kernels.moe.reference import Choice, Chosen
from minisgl.kernels.tuning import tuning_of
from minisgl.shards import Shard


def choose_of(choice: Choice, own: Shard) -> Chosen:
    """As choose_of of reference.py."""
    if not isinstance(choice, Chosen) and runs_triton(choice.logits.device):
        from minisgl.kernels.moe import routing

        return routing.choose_of(choice, own)
    return reference.choose_of(choice, own)


def joins_shared(num_rows: int, device: torch.device) -> bool:
    """Whether so many rows have a shared expert computed with the others, and not beside them."""
    return num_rows <= tuning_of(device).shared_expert_rows
