"""What products take: rows of the model's dtype, or rounded to FP8 or INT8 by the kernel before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FEW_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """x in e4m3 or int8, times its scales. The memory of both tensors goes on to `room(m)` rows,
    with anything in those behind m: a GEMM may read them, but not let them count."""

    data: Tensor  # [m, k] float8_e4m3fn or int8, contiguous
    # float32: [m], or of groups of columns [m, ceil(k / group)], the rows of a group side by side
    scale: Tensor
    dtype: torch.dtype  # of x before, and so of what is computed from it

    def __len__(self) -> int:
        return len(self.data)


Input = Tensor | Fp8Rows


def room(num_rows: int) -> int:
    """A multiple of the rows in the tiles for few rows, or else of 4, which cuBLAS wants."""
    return next((size for size in _FEW_ROWS if num_rows <= size), -(-num_rows // 4) * 4)
