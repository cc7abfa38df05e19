"""Products with weights of the model's own dtype.

With few rows the Triton kernels of this folder run where `config` says that they are faster; else
cuBLASLt where it was tuned, or F.linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.launch_options import compiles_gated_norm
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.fusing_product import FusingProduct
from minisgl.kernels.linear.product import Product
from minisgl.kernels.residual import NormWeights, Residual
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import DeviceTuning, tuning_of

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.linear.cublaslt import Products
    from minisgl.kernels.linear.tiles import LinearWorkspace


class LinearKernels(NamedTuple):
    """The memory and the tuning that the products of a model share; one product runs at a time."""

    tuning: DeviceTuning
    workspace: LinearWorkspace  # of the Triton kernels
    products: Products | None  # of cuBLASLt, for the shapes that it was tuned for


class DenseProduct(FusingProduct):
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

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self.gemm(x) if self.fuses(x.shape[0]) else self.separate(x)

    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        kernels = self.kernels
        if kernels is None:
            return False
        from minisgl.kernels.linear import dense_tiles

        is_faster = dense_tiles.should_fuse_norm if normed else dense_tiles.should_use
        if not is_faster(kernels.tuning, num_rows, *self.weight.shape, gated=gated):
            return False
        return not (gated and normed) or compiles_gated_norm(self.weight.device)

    def adds(self, num_rows: int, *, gated: bool = False) -> bool:
        """Whether `gemm` is faster than separate steps with a delta in the epilogue."""
        if self.kernels is None:
            return False
        from minisgl.kernels.linear import dense_tiles

        tuning, shape = self.kernels.tuning, self.weight.shape
        return dense_tiles.should_use(tuning, num_rows, *shape, gated=gated, adapted=True)

    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        from minisgl.kernels.linear import dense_gemm

        assert self.kernels is not None
        return dense_gemm.linear(
            x,
            self.weight,
            self.bias,
            epilogue=epilogue,
            norm=norm,
            workspace=self.kernels.workspace,
        )

    def separate(self, x: Tensor) -> Tensor:
        kernels = self.kernels
        if self.bias is None and kernels is not None and kernels.products is not None:
            y = kernels.products(x, self.weight)
            if y is not None:
                return y
        return F.linear(x, self.weight, self.bias)

    def of_input_norm(self, x: Tensor, weights: NormWeights, rows: Rows | None = None) -> Tensor:
        if not self.sums_squares or not self.fuses(x.shape[0], normed=True):
            return super().of_input_norm(x, weights, rows)
        return self.gemm(x, norm=FusedNorm(weights.weight, weights.eps, None))

    @property
    def sums_squares(self) -> bool:
        """Whether x is so short that every program of a GEMM may sum up the squares of its rows."""
        return self.kernels is not None and self.weight.shape[1] <= self.kernels.tuning.summed_k

    def of_kept_norm(
        self, residual: Residual, weights: NormWeights, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels, stream, squares = self.kernels, residual.rows, residual.squares
        if kernels is not None and squares is not None:
            from minisgl.kernels.linear import dense_gemm, dense_tiles

            if dense_tiles.should_keep_norm(kernels.tuning, stream.shape[0], *self.weight.shape):
                fused = FusedNorm(weights.weight, weights.eps, squares)
                x = torch.empty_like(stream)
                y = dense_gemm.linear(stream, self.weight, self.bias, norm=fused, normed=x)
                return x, y, stream
        return super().of_kept_norm(residual, weights, rows)


def share_kernels(products: Iterable[Product]) -> None:
    """Give the dense products among these, which run one at a time, the kernels that there are for
    their dtype and device, and the memory that these need."""
    dense = [product for product in products if isinstance(product, DenseProduct)]
    if not dense:
        return
    first = dense[0].weight
    if first.dtype == torch.float32 or not runs_triton(first.device):
        return
    from minisgl.kernels.linear.cublaslt import load_products
    from minisgl.kernels.linear.dense_tiles import MAX_ROWS, allocate_workspace

    shapes = {(product.weight.shape[0], product.weight.shape[1]) for product in dense}
    kernels = LinearKernels(
        tuning=tuning_of(first.device),
        workspace=allocate_workspace(shapes, MAX_ROWS, first.device),
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
