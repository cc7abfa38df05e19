"""The soft cap of logits as one Triton kernel, with the rounding of `soft_cap` in reference.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.inlined import wait_for_previous
from minisgl.kernels.launch_options import pdl_options, warps_for

_COLUMNS = 2048


def soft_cap(x: Tensor, cap: float, *, pdl: bool = True) -> Tensor:
    """See dispatch.py; x contiguous. Writes over x. `pdl`: see launch_options.py."""
    assert x.is_contiguous()
    # One axis of the grid, since the others end at 65,535.
    grid = (triton.cdiv(x.numel(), _COLUMNS),)
    _soft_cap_tile[grid](
        x,
        x.numel(),
        cap,
        columns=_COLUMNS,
        num_warps=warps_for(_COLUMNS, 16),
        **pdl_options(x.device, pdl),
    )
    return x


@triton.jit(do_not_specialize=["cap"])
def _soft_cap_tile(x, size, cap, columns: tl.constexpr, pdl: tl.constexpr):
    """`columns` numbers a program."""
    place = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    wait_for_previous(pdl)

    found = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    # 1 - 2 / (e^2y + 1) is tanh y; near 0, where it loses digits, the series is exact.
    y = found / cap
    squared = y * y
    near = y * (1.0 - squared * (1.0 / 3.0 - squared * (2.0 / 15.0)))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * y))
    capped = cap * tl.where(tl.abs(y) < 0.05, near, far)
    tl.store(x + place, capped.to(x.dtype.element_ty), mask=place < size)
