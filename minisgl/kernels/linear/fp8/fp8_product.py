"""Products with FP8 weights on a GPU with FP8 tensor cores, and with INT8 weights.

x is rounded once, in the kernel that computes it where that is a norm or a gated activation, and
the GEMM takes it so: ours with few rows and for INT8, torch's with many.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.adapters import Delta
from minisgl.kernels.elementwise.quantize import quantize, rms_norm_quantize
from minisgl.kernels.fp8_rows import Fp8Rows, Input
from minisgl.kernels.linear.fp8 import fp8_gemm, scaled_mm
from minisgl.kernels.linear.fp8.fp8_tiles import allocate_workspace, should_use
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import Fp8Product, Fp8Weights
from minisgl.kernels.linear.tiles import LinearWorkspace
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual, norm
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import DeviceTuning, tuning_of

if TYPE_CHECKING:
    from minisgl.kernels.comm.mailbox import Mailbox


class Fp8Kernels(NamedTuple):
    """The memory and the tuning that the products of a model share; one product runs at a time."""

    tuning: DeviceTuning
    workspace: LinearWorkspace


class TensorCoreProduct(Fp8Product):
    """The product on tensor cores. x is rounded to the dtype of W with scales of its rows, of the
    columns of a row that meet one block of W, or with the checkpoint's."""

    def __init__(
        self,
        weight: Fp8Weights,
        bias: Tensor | None = None,
        *,
        activations: Activations,
        input_scale: Tensor | None = None,
    ) -> None:
        assert activations != Activations.GROUP or weight.block is not None
        super().__init__(weight, bias, activations=activations, input_scale=input_scale)
        self._group = weight.group if activations == Activations.GROUP else None
        self._dtype = weight.data.dtype
        self._kernels: Fp8Kernels | None = None  # see share_kernels

    def __call__(self, x: Input, rows: Rows | None = None) -> Tensor:
        return self._multiply(self.rounded_rows(x))

    def of_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        stream, scales = residual.rows, (self._group, self.input_scale)
        if residual.pending is None:
            x = rms_norm_quantize(
                *(stream, residual.delta, weights.weight, weights.eps, *scales), dtype=self._dtype
            )
        else:
            normed, stream = norm(residual, weights)
            x = quantize(normed, *scales, dtype=self._dtype)
        return self._multiply(x), stream

    def gated_mul(self, gate_up: Tensor, rows: Rows | None = None, *, gelu: bool = False) -> Input:
        scales = self._group, self.input_scale
        return quantize(gate_up, *scales, dtype=self._dtype, gated=True, gelu=gelu)

    def send(self, x: Input, mailbox: Mailbox, rows: Rows | None = None) -> PendingNorm | None:
        if not self.fuses(len(x)):
            return None
        from minisgl.kernels.comm import one_shot

        self.gemm(self.rounded_rows(x), mailbox=mailbox)
        return partial(one_shot.received_norm, mailbox=mailbox)

    def fuses(self, num_rows: int) -> bool:
        """Whether `gemm` is faster than torch's."""
        assert self._kernels is not None
        return should_use(self._kernels.tuning, num_rows, self.weight.group)

    def gemm(
        self, x: Fp8Rows, *, mailbox: Mailbox | None = None, delta: Delta | None = None
    ) -> Tensor:
        """As fp8_gemm.linear."""
        assert self._kernels is not None
        workspace = self._kernels.workspace
        return fp8_gemm.linear(
            x, self.weight, self.bias, mailbox=mailbox, delta=delta, workspace=workspace
        )

    def rounded_rows(self, x: Input) -> Fp8Rows:
        if isinstance(x, Fp8Rows):
            return x
        return quantize(x, self._group, self.input_scale, dtype=self._dtype)

    def _multiply(self, x: Fp8Rows) -> Tensor:
        if not self.fuses(len(x)) and scaled_mm.takes(x, self.weight, self.bias):
            return scaled_mm.linear(x, self.weight, self.bias)
        return self.gemm(x)


def share_kernels(products: Iterable[Product]) -> None:
    """Give the FP8 products among these, which run one at a time, the memory that their kernels
    need."""
    fp8 = [product for product in products if isinstance(product, TensorCoreProduct)]
    if not fp8:
        return
    device = fp8[0].weight.data.device
    shapes = {(*product.weight.data.shape, product.weight.group) for product in fp8}
    kernels = Fp8Kernels(tuning_of(device), allocate_workspace(shapes, device))
    for product in fp8:
        product._kernels = kernels
