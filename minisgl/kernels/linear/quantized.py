"""Quantised weights, their products, and the arithmetic that every kernel for them follows.

FP8: W is e4m3 numbers times a scale of each row, or of each block. Where x is rounded, too, it is
x8 · s with s = max|x| / 448 over a row, or over the columns of a row that meet one block, or a
constant; x8 is round-to-nearest-even of x / s in e4m3. This depends on a row alone, never on the
number of rows. INT8: the same of integers and scales of rows, with 127 in the place of 448. INT4: W
is (q - zero) · scale, with a scale (and zero) of each group of a row's columns; x is never rounded.

The functions here compute with float32 sums on any device; they are the CPU path, and the reference
of the kernels. The result is rounded once, to the dtype of x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.hardware import has_fp8_products
from minisgl.kernels.linear.product import Product
from minisgl.kernels.rows import Rows

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}  # e4m3 has no infinity
CHUNK = 64  # columns of INT4 weights whose order in memory is that of `pack_int4`
_LARGEST_STDS = 7  # of random numbers: more saturates


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has products of two FP8 matrices. Others leave x as it is."""
    on_gpu = device.type == "cuda"
    return has_fp8_products(torch.cuda.get_device_capability(device) if on_gpu else None)


# -- weights --------------------------------------------------------------------------------------


class ExpertMatrices(Protocol):
    """The quantised matrices of experts, or by `expert` one of them."""

    def named(self, name: str) -> dict[str, Tensor]:
        """The tensors as a layer's parameters."""
        ...

    def expert(self, index: int) -> Self:
        """A view of the matrix of one expert."""
        ...

    def dequantized(self) -> Tensor:
        """W [..., n, k] float32."""
        ...

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        """Numbers with a standard deviation of `std`, or nearly."""
        ...


class QuantizedWeights(ExpertMatrices, Protocol):
    """A quantised matrix, or with a leading dimension one of each expert."""

    def rows(self, first: int, size: int) -> Self:
        """A view of some rows of a matrix."""
        ...


class Fp8Weights(NamedTuple):
    """A matrix, or with a leading dimension one of each expert."""

    data: Tensor  # [..., n, k] e4m3, or int8: INT8 weights, without blocks
    scale: Tensor  # float32: [..., n], or with blocks [..., ⌈n / rows⌉, ⌈k / columns⌉]
    block: tuple[int, int] | None = None  # rows and columns of a block

    @staticmethod
    def allocate(
        *shape: int, block: tuple[int, int] | None, dtype: torch.dtype = E4M3
    ) -> Fp8Weights:
        """Uninitialised weights [..., n, k], on torch's default device."""
        *leading, n, k = shape
        scales = [n] if block is None else [-(-n // block[0]), -(-k // block[1])]
        data = torch.empty(shape, dtype=dtype)
        return Fp8Weights(data, torch.empty([*leading, *scales], dtype=torch.float32), block)

    @property
    def group(self) -> int | None:
        """The columns of x that share a scale of their own where those of W do."""
        return None if self.block is None else self.block[1]

    def named(self, name: str) -> dict[str, Tensor]:
        return {name: self.data, f"{name}_scale": self.scale}

    def rows(self, first: int, size: int) -> Fp8Weights:
        """As in QuantizedWeights. With blocks, `first` is a block's first row."""
        height = 1 if self.block is None else self.block[0]
        assert first % height == 0
        scale = self.scale[first // height : -(-(first + size) // height)]
        return Fp8Weights(self.data[first : first + size], scale, self.block)

    def expert(self, index: int) -> Fp8Weights:
        return Fp8Weights(self.data[index], self.scale[index], self.block)

    def dequantized(self) -> Tensor:
        scale = self.scale[..., None]
        if self.block is not None:
            n, k = self.data.shape[-2:]
            rows = self.scale.repeat_interleave(self.block[0], dim=-2)[..., :n, :]
            scale = rows.repeat_interleave(self.block[1], dim=-1)[..., :k]
        return self.data.float() * scale

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        scale = _LARGEST_STDS / LARGEST[self.data.dtype]
        for matrix in self.data if self.data.dim() == 3 else [self.data]:
            numbers = torch.randn(matrix.shape, generator=generator, device=matrix.device)
            matrix.copy_(quantize_static(numbers, torch.tensor(scale), self.data.dtype))
        self.scale.fill_(std * scale)


class Int4Weights(NamedTuple):
    """A matrix, or with a leading dimension one of each expert. k is a multiple of CHUNK."""

    data: Tensor  # [..., n, k / 4] int16: see pack_int4
    scale: Tensor  # [..., k / group_size, n], of a floating dtype
    zero: Tensor | None  # [..., k / group_size, n] uint8; None: 8

    @staticmethod
    def allocate(
        *shape: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype
    ) -> Int4Weights:
        """Uninitialised weights [..., n, k], on torch's default device."""
        *leading, n, k = shape
        scales = [*leading, k // group_size, n]
        return Int4Weights(
            torch.empty([*leading, n, k // 4], dtype=torch.int16),
            torch.empty(scales, dtype=scale_dtype),
            None if symmetric else torch.empty(scales, dtype=torch.uint8),
        )

    @property
    def group_size(self) -> int:
        return 4 * self.data.shape[-1] // self.scale.shape[-2]

    def named(self, name: str) -> dict[str, Tensor]:
        zero = {} if self.zero is None else {f"{name}_zero": self.zero}
        return {name: self.data, f"{name}_scale": self.scale, **zero}

    def rows(self, first: int, size: int) -> Int4Weights:
        part = slice(first, first + size)
        zero = None if self.zero is None else self.zero[:, part]
        return Int4Weights(self.data[part], self.scale[:, part], zero)

    def expert(self, index: int) -> Int4Weights:
        zero = None if self.zero is None else self.zero[index]
        return Int4Weights(self.data[index], self.scale[index], zero)

    def dequantized(self) -> Tensor:
        zero = 8 if self.zero is None else self._of_columns(self.zero)
        return (unpack_int4(self.data).float() - zero) * self._of_columns(self.scale.float())

    def _of_columns(self, values: Tensor) -> Tensor:
        """[..., k / group_size, n] → [..., n, k]."""
        return values.mT.repeat_interleave(self.group_size, dim=-1)

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        for packed in self.data if self.data.dim() == 3 else [self.data]:
            # From 1 to 15, whose mean is the zero point.
            numbers = torch.randint(
                *(1, 16, (packed.shape[0], 4 * packed.shape[1])),
                generator=generator,
                dtype=torch.uint8,
                device=packed.device,
            )
            packed.copy_(pack_int4(numbers))
        self.scale.fill_(std / math.sqrt((15**2 - 1) / 12))
        if self.zero is not None:
            self.zero.fill_(8)


def pack_int4(q: Tensor) -> Tensor:
    """Four numbers from 0 to 15 in one.

    q: [..., n, k] uint8; returns [..., n, k / 4] int16. Of each CHUNK of columns, bits 4i to 4i + 3
    of element j hold column 16 · i + j, so that a mask and a shift give 16 neighbours.
    """
    quarters = q.unflatten(-1, (-1, 4, CHUNK // 4)).to(torch.int32).unbind(-2)
    packed = quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12
    kept: Tensor = packed.to(torch.int16)  # the low 16 bits
    return kept.flatten(-2)


def unpack_int4(data: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    packed = data.unflatten(-1, (-1, 1, CHUNK // 4)).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=data.device)[:, None]
    quarters: Tensor = (packed >> shifts) & 15
    return quarters.to(torch.uint8).flatten(-3)


# -- rounding -------------------------------------------------------------------------------------


def quantize_rows(
    x: Tensor, group: int | None = None, dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """x as numbers of `dtype` with a scale of each row, or of every `group` columns of each row.

    x: [..., k] of any floating dtype. Returns x8 [..., k] and the scales, float32: [...], or
    [..., ⌈k / group⌉]. Zeros have the scale 1, and a NaN makes NaN of all that share its scale.
    """
    k = x.shape[-1]
    groups = F.pad(x.float(), (0, -k % (group or k))).unflatten(-1, (-1, group or k))
    scale = _scale(groups.abs().amax(-1), LARGEST[dtype])
    x8 = quantize_static(groups, scale[..., None], dtype).flatten(-2)[..., :k]
    return x8, scale if group else scale[..., 0]


def quantize_static(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Numbers of `dtype` that times scale are x, rounded to nearest even and saturated."""
    steps = (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (steps if dtype.is_floating_point else steps.round()).to(dtype)


def _scale(largest: Tensor, stored: float) -> Tensor:
    # By a number instead of a tensor, torch does not divide on a GPU: it multiplies with the
    # reciprocal, which rounds in another way.
    scale = largest / torch.full_like(largest, stored)
    return torch.where(largest == 0, 1.0, scale)


def rounded(
    x: Tensor,
    activations: Activations,
    group: int | None,
    input_scale: Tensor | None,
    dtype: torch.dtype = E4M3,
) -> Tensor:
    """What a product computes with in the place of x: float32, of x's shape.

    group: columns of a block of weights. input_scale: float32, one number, for e4m3.
    """
    if activations == Activations.NONE:
        return x.float()
    if activations == Activations.STATIC:
        assert input_scale is not None
        return quantize_static(x, input_scale).float() * input_scale
    if activations == Activations.TOKEN or group is None:
        group = x.shape[-1]
    x8, scale = quantize_rows(x, group, dtype)
    return x8.float() * scale.repeat_interleave(group, dim=-1)[..., : x.shape[-1]]


# -- products -------------------------------------------------------------------------------------


class QuantizedProduct(Product):
    """W [n, k] is quantised."""

    weight: QuantizedWeights
    input_scale: Tensor | None = None  # one float32 number, for STATIC activations

    def __init__(self, weight: QuantizedWeights, bias: Tensor | None = None) -> None:
        """bias: [n], of x's dtype."""
        self.weight = weight
        self.bias = bias

    @property
    def weights(self) -> Mapping[str, Tensor]:
        others = {"input_scale": self.input_scale, "bias": self.bias}
        kept = {name: tensor for name, tensor in others.items() if tensor is not None}
        return self.weight.named("weight") | kept

    def rounded(self, x: Tensor) -> Tensor:
        """What is multiplied in the place of x: float32."""
        return x.float()

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(self.rounded(x), self.weight.dequantized(), bias).to(x.dtype)


class Fp8Product(QuantizedProduct):
    """W [n, k] in FP8 or INT8, and x rounded to the same as `activations` says."""

    weight: Fp8Weights

    def __init__(
        self,
        weight: Fp8Weights,
        bias: Tensor | None = None,
        *,
        activations: Activations,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__(weight, bias)
        self.activations = activations
        self.input_scale = input_scale

    def rounded(self, x: Tensor) -> Tensor:
        weight = self.weight
        return rounded(x, self.activations, weight.group, self.input_scale, weight.data.dtype)


class Int4Product(QuantizedProduct):
    """W [n, k] in INT4."""

    weight: Int4Weights
