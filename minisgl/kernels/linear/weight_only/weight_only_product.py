"""Products with quantised weights and plain x on a GPU.

Tensor cores wait for weights that are dequantised in registers, so that with many rows dense
weights are faster. Where memory is plentiful, a product keeps its W a second time, in the model's
dtype: a *dense copy*. The numbers are the same, only sums are in another order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.launch_options import compiles_gated_norm
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import PLAIN, Epilogue, FusedNorm
from minisgl.kernels.linear.fusing_product import FusingProduct
from minisgl.kernels.linear.nvfp4 import Nvfp4Weights
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.quantized import CHUNK, Fp8Weights, Int4Weights, QuantizedProduct
from minisgl.kernels.linear.weight_only.weights import (
    WeightWords,
    e4m3_span,
    e4m3_words,
    int4_words,
    nvfp4_span,
    nvfp4_words,
)
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import DeviceTuning, tuning_of

if TYPE_CHECKING:  # not every platform has Triton
    from minisgl.kernels.linear.tiles import LinearWorkspace


class WeightOnlyKernels(NamedTuple):
    """The memory and the tuning that the products of a model share; one product runs at a time."""

    tuning: DeviceTuning
    workspace: LinearWorkspace
    # Room for the largest W, of x's dtype; None where the products have dense copies.
    dequantized: Tensor | None


class WeightOnlyProduct(FusingProduct, QuantizedProduct):
    """W is quantised, x is not. A subclass says what W is made of."""

    bits: ClassVar[int]  # 4 or 8
    weight: Fp8Weights | Int4Weights | Nvfp4Weights

    def __init__(
        self, weight: Fp8Weights | Int4Weights | Nvfp4Weights, bias: Tensor | None = None
    ) -> None:
        super().__init__(weight, bias)
        self.kernels: WeightOnlyKernels | None = None  # see share_kernels
        self.dense: DenseProduct | None = None  # with the dense copy: see keep_dense_copies
        self._words: WeightWords | None = None
        self._dtype = torch.bfloat16  # of the x that these are for

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        n, width = self.weight.data.shape
        return n, width * self.weight.data.element_size() * 8 // self.bits

    @property
    @abstractmethod
    def span(self) -> int | None:
        """That of the words, or None if the kernels cannot take these weights."""
        ...

    @abstractmethod
    def make_words(self, dtype: torch.dtype) -> WeightWords:
        """The weights as the kernels read them, for x of this dtype."""
        ...

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        kernels = self.kernels
        if kernels is None:
            return super().__call__(x, rows)
        if dense := self._dense_for(x.shape[0]):
            return dense(x, rows)
        if x.shape[0] <= kernels.tuning.weight_only_rows:
            return self.gemm(x)
        from minisgl.kernels.linear.weight_only import weight_only_gemm

        assert kernels.dequantized is not None
        words = self._prepared(x.dtype)
        return F.linear(x, weight_only_gemm.dequantize(words, kernels.dequantized), self.bias)

    def fuses(self, num_rows: int, *, gated: bool = False, normed: bool = False) -> bool:
        if dense := self._dense_for(num_rows):
            return dense.fuses(num_rows, gated=gated, normed=normed)
        kernels = self.kernels
        if kernels is None:
            return False
        tuning, (_, k) = kernels.tuning, self.shape
        if gated and normed and not compiles_gated_norm(kernels.workspace.partials.device):
            return False
        if normed:
            return num_rows <= tuning.norm_rows and k <= tuning.norm_k
        return num_rows <= (tuning.weight_only_gated_rows if gated else tuning.weight_only_add_rows)

    def gemm(
        self, x: Tensor, epilogue: Epilogue = PLAIN, *, norm: FusedNorm | None = None
    ) -> Tensor:
        if dense := self._dense_for(x.shape[0]):
            return dense.gemm(x, epilogue, norm=norm)
        from minisgl.kernels.linear.weight_only import weight_only_gemm

        assert self.kernels is not None
        return weight_only_gemm.linear(
            x,
            self._prepared(x.dtype),
            self.bias,
            epilogue=epilogue,
            norm=norm,
            workspace=self.kernels.workspace,
        )

    def separate(self, x: Tensor) -> Tensor:
        dense = self._dense_for(x.shape[0])
        return self(x) if dense is None else dense.separate(x)

    def prepare(self, dtype: torch.dtype) -> None:
        """Make what the kernels read of the weights that a checkpoint has filled, if there are
        kernels. Must come before a graph is captured; otherwise the first call does it."""
        if self.kernels is not None:
            self._prepared(dtype)

    @property
    def can_refresh(self) -> bool:
        return self._words is None or not any(
            each.is_meta for each in self.weight if isinstance(each, Tensor)
        )

    def refresh(self) -> None:
        if self._words is None:
            return
        words, scales = self._words[:2]
        made = self.make_words(self._dtype)
        words.copy_(made.words)
        scales.copy_(made.scales)
        if self.dense is not None:
            from minisgl.kernels.linear.weight_only import weight_only_gemm

            weight_only_gemm.dequantize(self._words, self.dense.weight, pdl=False)

    def keep_dense_copy(self, dtype: torch.dtype) -> DenseProduct:
        """Keep W a second time, in the dtype of x, and return the product with it, which has no
        kernels yet."""
        from minisgl.kernels.linear.weight_only import weight_only_gemm

        assert self.kernels is not None
        words = self._prepared(dtype)
        copy = torch.empty(self.shape, dtype=dtype, device=words.words.device)
        # Without an overlap, since the last launch may have made the words.
        self.dense = DenseProduct(weight_only_gemm.dequantize(words, copy, pdl=False), self.bias)
        self.kernels = self.kernels._replace(dequantized=None)
        return self.dense

    def _dense_for(self, num_rows: int) -> DenseProduct | None:
        """The product with the dense copy, if there is one and the rows are enough for it."""
        kernels = self.kernels
        if kernels is None or num_rows <= kernels.tuning.weight_only_dense_rows:
            return None
        return self.dense

    def _prepared(self, dtype: torch.dtype) -> WeightWords:
        if self._words is None:
            self._words, self._dtype = self.make_words(dtype), dtype
        return self._words


class WeightOnlyInt4Product(WeightOnlyProduct):
    """W in INT4."""

    bits = 4
    weight: Int4Weights

    @property
    def span(self) -> int:
        return max(self.weight.group_size, CHUNK)

    def make_words(self, dtype: torch.dtype) -> WeightWords:
        return int4_words(*self.weight, dtype)

    def prepare(self, dtype: torch.dtype) -> None:
        super().prepare(dtype)
        if self.kernels is not None and self.weight.data.is_cuda:
            self.forget_scales()

    def forget_scales(self) -> None:
        """Let go of the checkpoint's scales and zero points, which the words have in them. Their
        shapes stay, and reading one is an error."""
        data, scale, zero = self.weight
        self.weight = Int4Weights(data, scale.to("meta"), None if zero is None else zero.to("meta"))


class WeightOnlyNvfp4Product(WeightOnlyProduct):
    """W in NVFP4, which the kernels read as it is."""

    bits = 4
    weight: Nvfp4Weights

    @property
    def span(self) -> int:
        return nvfp4_span(self.shape[1])

    def make_words(self, dtype: torch.dtype) -> WeightWords:
        return nvfp4_words(self.weight)


class WeightOnlyFp8Product(WeightOnlyProduct):
    """W in FP8."""

    bits = 8
    weight: Fp8Weights

    @property
    def span(self) -> int | None:
        return e4m3_span(self.shape[1], self.weight.block)

    def make_words(self, dtype: torch.dtype) -> WeightWords:
        words = e4m3_words(*self.weight, dtype)
        assert words is not None, "without a span there are no kernels"
        return words


def share_kernels(products: Iterable[Product], dtype: torch.dtype, device: torch.device) -> None:
    """Give the products among these with quantised weights, which run one at a time with x of this
    dtype, the kernels and the memory that these need, where they run."""
    if dtype == torch.float32 or not runs_triton(device):
        return
    taken = [
        (product, span)
        for product in products
        if isinstance(product, WeightOnlyProduct) and (span := product.span) is not None
    ]
    if not taken:
        return
    from minisgl.kernels.linear.weight_only.weight_only_tiles import allocate_workspace

    largest = max(product.shape[0] * product.shape[1] for product, _ in taken)
    kernels = WeightOnlyKernels(
        tuning=tuning_of(device),
        workspace=allocate_workspace(
            {(*product.shape, span, product.bits) for product, span in taken}, device
        ),
        dequantized=torch.empty(largest, dtype=dtype, device=device),
    )
    for product, _ in taken:
        product.kernels = kernels


def dense_copy_elements(products: Iterable[Product]) -> int:
    """The weights of which `keep_dense_copies` makes copies."""
    return sum(product.shape[0] * product.shape[1] for product in _with_kernels(products))


def keep_dense_copies(products: Iterable[Product], dtype: torch.dtype) -> list[DenseProduct]:
    """Give the products among these that have kernels dense copies, for x of this dtype. The
    checkpoint must have filled the weights.

    Returns the products with the copies, which have no kernels yet.
    """
    return [product.keep_dense_copy(dtype) for product in _with_kernels(products)]


def _with_kernels(products: Iterable[Product]) -> list[WeightOnlyProduct]:
    return [
        product
        for product in products
        if isinstance(product, WeightOnlyProduct) and product.kernels is not None
    ]
