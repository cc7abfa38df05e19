"""How full the memory of a GPU is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Bytes of a GPU's memory, used by all processes and in all."""

    used: int
    total: int


def gpu_memory() -> GPUMemory | None:
    """Of the GPU that this process uses; None if it does not answer, as after a fault."""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return None
    return GPUMemory(total - free, total)
