"""FP8 weights as the kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fp8Weights(NamedTuple):
    """W[i, j] = data[i, j] · scale[i], or with blocks data[i, j] · scale[i // block[0], j //
    block[1]]."""

    data: Tensor  # [n, k] float8_e4m3fn, contiguous
    scale: Tensor  # float32, contiguous: [n], or [ceil(n / block[0]), ceil(k / block[1])]
    block: tuple[int, int] | None = None  # powers of two

    @property
    def group(self) -> int | None:
        """The columns of x that share a scale of their own, as those of W do."""
        return None if self.block is None else self.block[1]
