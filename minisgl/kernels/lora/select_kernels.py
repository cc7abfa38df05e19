"""Selects what computes adapters on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.lora import reference


class AdapterKernels(NamedTuple):
    """The functions of reference.py, and the memory that they need."""

    sort_rows: Callable[[Tensor, int], AdaptedRows]
    shrink: Callable[[Tensor, AdapterWeights, AdaptedRows], Delta]
    expand: Callable[[Tensor, Delta], None]
    num_bytes: int = 0


def kernels_for(device: torch.device) -> AdapterKernels:
    """Those of all products of a model, one of which runs at a time."""
    if not runs_triton(device):
        return AdapterKernels(reference.sort_rows, reference.shrink, reference.expand)
    from minisgl.kernels.lora import expand_kernel, shrink_kernel, sort_kernel

    workspace = shrink_kernel.allocate_workspace(device)
    return AdapterKernels(
        sort_kernel.sort_rows,
        partial(shrink_kernel.shrink, workspace=workspace),
        expand_kernel.expand,
        workspace.partials.nbytes + workspace.semaphores.nbytes,
    )
