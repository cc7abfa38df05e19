"""Rows and weights in FP8 and INT8, and the arithmetic of their products in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.fp8_rows import Fp8Rows
from minisgl.kernels.linear.quantized import Fp8Weights

E4M3 = torch.float8_e4m3fn


def expected_rows(
    x: Tensor, group: int | None = None, static: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x8 and its scales, as Fp8Rows has them."""
    wide = x.float()
    if static is not None:
        return (wide / static).clamp(-448, 448).to(E4M3), static.expand(len(x))
    k = x.shape[1]
    groups = F.pad(wide, (0, -k % (group or k))).unflatten(1, (-1, group or k))
    largest = groups.abs().amax(2)
    # By a number, CUDA would multiply with its reciprocal.
    scale = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 448))
    x8 = (groups / scale[:, :, None]).clamp(-448, 448).flatten(1)[:, :k].to(E4M3)
    return x8, scale[:, 0] if group is None else scale


def expected_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x8 and its scales: of each row, by which its largest is 127."""
    largest = x.float().abs().amax(1)
    scale = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 127))
    return (x.float() / scale[:, None]).round().to(torch.int8), scale


def weights(
    n: int,
    k: int,
    block: tuple[int, int] | None,
    device: torch.device,
    dtype: torch.dtype = E4M3,
) -> Fp8Weights:
    """Random ones, with scales of very different sizes, one of which is 0."""
    shape = (n,) if block is None else (-(-n // block[0]), -(-k // block[1]))
    scale = torch.exp2(torch.randint(-12, -4, shape, device=device)) * torch.rand(
        shape, device=device
    )
    scale.view(-1)[-1] = 0
    most = 448 if dtype == E4M3 else 127
    data = (torch.randn(n, k, device=device) * 100).clamp(-most, most).to(dtype)
    return Fp8Weights(data, scale, block)


def wide_weights(weights: Fp8Weights) -> Tensor:
    """W in float64."""
    data, scale, block = weights
    if block is None:
        return data.double() * scale.double()[:, None]
    return data.double() * spread(spread(scale.T, block[0], len(data)).T, block[1], data.shape[1])


def wide_rows(x: Fp8Rows, group: int | None) -> Tensor:
    """x in float64."""
    if x.scale.dim() == 1:
        return x.data.double() * x.scale.double()[:, None]
    assert group is not None
    return x.data.double() * spread(x.scale, group, x.data.shape[1])


def spread(scale: Tensor, size: int, columns: int) -> Tensor:
    """Each column `size` times, `columns` in all, float64."""
    return scale.double().repeat_interleave(size, 1)[:, :columns]


def expected_product(x: Fp8Rows, weights: Fp8Weights, bias: Tensor | None = None) -> Tensor:
    """In float64."""
    product = wide_rows(x, weights.group) @ wide_weights(weights).T
    return product if bias is None else product + bias.double()


def assert_product(y: Tensor, x: Fp8Rows, weights: Fp8Weights, bias: Tensor | None = None) -> None:
    """One rounding away from the exact result, but for the sums of the tensor cores.

    Hopper's add 32 products at a time, each cut off at 2^-13 of the largest of them and of the sum
    so far: at half of that on average, so that 32 of one sign lose 2^-9 of it. What steps lose is
    independent, as random data are, and grows as the root of the sum of squares of the products:
    2^-8 of this is allowed. 2^-10.2 was the most in millions of results on an H200.
    """
    expected = expected_product(x, weights, bias)
    wide_x, wide_w = wide_rows(x, weights.group), wide_weights(weights)
    size = (wide_x.square() @ wide_w.square().T).sqrt()
    allowed = expected.abs() * torch.finfo(y.dtype).eps * 0.51 + size * 2.0**-8
    assert y.dtype == x.dtype
    assert not y.isnan().any()
    assert bool(((y.double() - expected).abs() <= allowed).all())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
