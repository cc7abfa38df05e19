"""Products with weights of the model's own dtype.

With few rows the Triton kernels of this folder run where `config` says that they are faster; else
cuBLASLt where it was tuned, or F.linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.launch import compiles_gated_norm
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import NormWeights, PendingNorm, Residual, norm
from minisgl.kernels.tuning import DeviceTuning, tuning_of

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.comm.mailbox import Mailbox
    from minisgl.kernels.linear.config import LinearWorkspace
    from minisgl.kernels.linear.cublaslt import Products


class LinearKernels(NamedTuple):
    """The memory and the tuning that the products of a model share; one product runs at a time."""

    tuning: DeviceTuning
    workspace: LinearWorkspace  # of the Triton kernels
    products: Products | None  # of cuBLASLt, for the shapes that it was tuned for


class DenseProduct(Product):
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [n, k]; bias: [n], of the same dtype."""
        self.weight = weight
        self.bias = bias
        self.kernels: LinearKernels | None = None  # see share_kernels

    @staticmethod
    def allocate(n: int, k: int, *, bias: bool, dtype: torch.dtype) -> DenseProduct:
        """Uninitialised weights, on torch's default device."""
        weight = torch.empty((n, k), dtype=dtype)
        return DenseProduct(weight, torch.empty(n, dtype=dtype) if bias else None)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        if self.bias is None:
            return {"weight": self.weight}
        return {"weight": self.weight, "bias": self.bias}

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self.kernels
        if kernels is not None:
            from minisgl.kernels.linear import config, launch

            if config.should_use(kernels.tuning, x.shape[0], *self.weight.shape, gated=False):
                return launch.linear(x, self.weight, self.bias, workspace=kernels.workspace)
        return self._gemm(x)

    def of_norm(self, residual: Residual, weights: NormWeights) -> tuple[Tensor, Tensor]:
        kernels, rows, squares = self.kernels, residual.rows, residual.squares
        if kernels is not None and squares is not None:
            from minisgl.kernels.linear import config, launch

            if config.should_fuse_norm(
                kernels.tuning, rows.shape[0], *self.weight.shape, gated=False
            ):
                fused = launch.FusedNorm(weights.weight, weights.eps, squares)
                y = launch.linear(
                    rows, self.weight, self.bias, norm=fused, workspace=kernels.workspace
                )
                return y, rows
        return super().of_norm(residual, weights)

    def of_kept_norm(
        self, residual: Residual, weights: NormWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels, rows, squares = self.kernels, residual.rows, residual.squares
        if kernels is not None and squares is not None:
            from minisgl.kernels.linear import config, launch

            if config.should_keep_norm(kernels.tuning, rows.shape[0], *self.weight.shape):
                fused = launch.FusedNorm(weights.weight, weights.eps, squares)
                x = torch.empty_like(rows)
                return x, launch.linear(rows, self.weight, self.bias, norm=fused, normed=x), rows
        return super().of_kept_norm(residual, weights)

    def silu_mul_of_norm(
        self, residual: Residual, weights: NormWeights, after: Product
    ) -> tuple[Any, Tensor]:
        kernels, rows, squares = self.kernels, residual.rows, residual.squares
        if kernels is None or self.bias is not None:
            return super().silu_mul_of_norm(residual, weights, after)
        from minisgl.kernels.linear import config, launch

        if squares is not None:
            fuse = config.should_fuse_norm(
                kernels.tuning, rows.shape[0], *self.weight.shape, gated=True
            )
            if fuse and compiles_gated_norm(rows.device):
                fused = launch.FusedNorm(weights.weight, weights.eps, squares)
                y = launch.linear_silu_mul(
                    rows, self.weight, norm=fused, workspace=kernels.workspace
                )
                return y, rows
        x, rows = norm(residual, weights)
        if config.should_use(kernels.tuning, x.shape[0], *self.weight.shape, gated=True):
            return launch.linear_silu_mul(x, self.weight, workspace=kernels.workspace), rows
        return after.silu_mul(self(x)), rows

    def add_to(self, x: Tensor, rows: Tensor) -> Residual:
        kernels = self.kernels
        if kernels is not None:
            from minisgl.kernels.linear import config, launch

            if config.should_use(kernels.tuning, x.shape[0], *self.weight.shape, gated=False):
                squares = launch.linear_add(
                    x, self.weight, self.bias, rows, workspace=kernels.workspace
                )
                return Residual(rows, squares=squares)
        return Residual(rows, delta=self._gemm(x))

    def send(self, x: Tensor, mailbox: Mailbox) -> PendingNorm | None:
        kernels = self.kernels
        if kernels is None:
            return None
        from minisgl.kernels.comm import one_shot
        from minisgl.kernels.linear import config, launch

        if not config.should_use(kernels.tuning, x.shape[0], *self.weight.shape, gated=False):
            return None
        launch.linear_send(x, self.weight, self.bias, mailbox, workspace=kernels.workspace)
        return partial(one_shot.received_norm, mailbox=mailbox)

    def _gemm(self, x: Tensor) -> Tensor:
        kernels = self.kernels
        if self.bias is None and kernels is not None and kernels.products is not None:
            y = kernels.products(x, self.weight)
            if y is not None:
                return y
        return F.linear(x, self.weight, self.bias)


def share_kernels(products: Iterable[Product]) -> None:
    """Give the dense products among these, which run one at a time, the kernels that there are for
    their dtype and device, and the memory that these need."""
    dense = [product for product in products if isinstance(product, DenseProduct)]
    if not dense:
        return
    first = dense[0].weight
    if first.dtype == torch.float32 or not runs_triton(first.device):
        return
    from minisgl.kernels.linear.config import MAX_ROWS, LinearWorkspace
    from minisgl.kernels.linear.cublaslt import load_products

    shapes = {(product.weight.shape[0], product.weight.shape[1]) for product in dense}
    kernels = LinearKernels(
        tuning=tuning_of(first.device),
        workspace=LinearWorkspace.allocate(shapes, MAX_ROWS, first.device),
        products=load_products(first.dtype, first.device),
    )
    for product in dense:
        product.kernels = kernels


def tune(products: Iterable[Product]) -> None:
    """Choose cuBLASLt's algorithms for the dense products without bias, by trying them."""
    by_shape: dict[torch.Size, list[DenseProduct]] = {}
    for product in products:
        if isinstance(product, DenseProduct) and product.bias is None:
            by_shape.setdefault(product.weight.shape, []).append(product)
    for alike in by_shape.values():
        kernels = alike[0].kernels
        if kernels is not None and kernels.products is not None:
            kernels.products.tune([product.weight for product in alike])
