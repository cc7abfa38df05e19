"""Selects what computes adapters on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows, AdapterWeights, Delta
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.linear.epilogue import FusedNorm
from minisgl.kernels.lora import reference


class AdapterKernels(NamedTuple):
    """The functions of reference.py."""

    sort_rows: Callable[[Tensor, int], AdaptedRows]
    shrink: Callable[[Tensor, AdapterWeights, AdaptedRows], Delta]
    shrink_norm: Callable[[Tensor, FusedNorm, AdapterWeights, AdaptedRows], tuple[Tensor, Delta]]
    expand: Callable[[Tensor, Delta], None]


def kernels_for(device: torch.device) -> AdapterKernels:
    if not runs_triton(device):
        return AdapterKernels(
            reference.sort_rows, reference.shrink, reference.shrink_norm, reference.expand
        )
    from minisgl.kernels.lora import expand_kernel, shrink_kernel, sort_kernel

    return AdapterKernels(
        sort_kernel.sort_rows,
        shrink_kernel.shrink,
        shrink_kernel.shrink_norm,
        expand_kernel.expand,
    )
