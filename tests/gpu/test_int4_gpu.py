"""Products with quantised weights and plain x at the sizes of real models, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.weight_only_cases import GivenWords, random_e4m3, random_int4, random_nvfp4

from minisgl.kernels.elementwise import reference
from minisgl.kernels.linear import select_product
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.linear.epilogue import GATED, Epilogue, FusedNorm
from minisgl.kernels.linear.product import Product
from minisgl.kernels.linear.weight_only import weight_only_product
from minisgl.kernels.linear.weight_only.weight_only_gemm import dequantize, linear
from minisgl.kernels.linear.weight_only.weight_only_tiles import allocate_workspace
from minisgl.kernels.linear.weight_only.weights import WeightWords, values
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import H200
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear
from minisgl.models.formats.int4 import CompressedInt4
from minisgl.shards import whole

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SHAPES = [(7168, 5120), (5120, 17408), (1152, 896), (37, 1024), (200, 256)]  # n, k
ROWS = [1, 9, 17, 50, 64, 65, 256, 300, 1536]
DTYPES = [torch.bfloat16, torch.float16]
KINDS = {
    "int4, 128": partial(random_int4, group=128, symmetric=True),
    "int4, 128, zeros": partial(random_int4, group=128, symmetric=False),
    "int4, 64, zeros": partial(random_int4, group=64, symmetric=False),
    "int4, 32": partial(random_int4, group=32, symmetric=True),
    "int4, 32, zeros": partial(random_int4, group=32, symmetric=False),
    "e4m3, rows": partial(random_e4m3, block=None),
    "e4m3, blocks": partial(random_e4m3, block=(128, 128)),
    "e4m3, small blocks": partial(random_e4m3, block=(64, 32)),
    "nvfp4": random_nvfp4,
}


# Every shape and dtype with one kind, and every kind with one shape: each takes seconds to compile.
CASES = [
    *((n, k, "int4, 128", dtype) for n, k in SHAPES for dtype in DTYPES),
    *((1152, 896, kind, torch.bfloat16) for kind in KINDS if kind != "int4, 128"),
    *((200, 256, kind, torch.float16) for kind in ("int4, 32, zeros", "e4m3, small blocks")),
    *((7168, 5120, "nvfp4", dtype) for dtype in DTYPES),
    (200, 320, "nvfp4", torch.bfloat16),
]


def make(kind: str, n: int, k: int, dtype: torch.dtype) -> tuple[WeightWords, Tensor]:
    """The words, and W float64."""
    return KINDS[kind](n, k, dtype=dtype, device=GPU)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype)


def assert_rounded(out: Tensor, expected: Tensor) -> None:
    """One rounding away from the exact result, but for the error of the float32 sums."""
    error = (out.double() - expected).abs()
    allowed = expected.abs() * torch.finfo(out.dtype).eps * 0.51 + expected.abs().mean() * 3e-4
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_and_dequantize_to_the_bit(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    weight, exact = make(kind, n, k, dtype)
    assert torch.equal(values(weight, dtype).double(), exact)
    room = torch.empty(n * k + 8, dtype=dtype, device=GPU)
    assert torch.equal(dequantize(weight, room).double(), exact)


@pytest.mark.parametrize(("n", "k", "kind", "dtype"), CASES)
def test_linear(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    weight, exact = make(kind, n, k, dtype)
    workspace = allocate_workspace([(n, k, weight.span, weight.bits)], GPU)
    every_x, bias = random(max(ROWS), k, dtype=dtype), random(n, dtype=dtype)
    expected = every_x.double() @ exact.T + bias.double()
    for m in ROWS:
        x = every_x[:m]
        assert_rounded(linear(x, weight, bias, workspace=workspace), expected[:m])
    assert not workspace.semaphores.any()


def test_linear_without_overlapping_launches_or_splits() -> None:
    n, k, dtype = 5120, 1024, torch.bfloat16
    weight, exact = make("int4, 128", n, k, dtype)
    workspace = allocate_workspace([(n, k, weight.span, weight.bits)], GPU)
    for m in (1, 32, 128):
        x = random(m, k, dtype=dtype)
        out = linear(x, weight, workspace=workspace)
        assert torch.equal(out, linear(x, weight, workspace=workspace, pdl=False))
        assert_rounded(linear(x, weight), x.double() @ exact.T)


@pytest.mark.parametrize(
    ("size", "k", "kind", "dtype"),
    [
        *((size, k, "int4, 128", torch.bfloat16) for size, k in ((17408, 1024), (37, 1024))),
        (576, 896, "int4, 32, zeros", torch.float16),
        (576, 896, "e4m3, rows", torch.float16),
        (576, 896, "e4m3, blocks", torch.bfloat16),
        (576, 896, "nvfp4", torch.bfloat16),
    ],
)
def test_gate_norm_and_add(size: int, k: int, kind: str, dtype: torch.dtype) -> None:
    weight, exact = make(kind, 2 * size, k, dtype)
    workspace = allocate_workspace([(2 * size, k, weight.span, weight.bits)], GPU)
    scale = random(k, dtype=dtype)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for m in (1, 17, 32, 128):
        x = random(m, k, dtype=dtype)
        norm = FusedNorm(scale, 1e-6, x.float().square().sum(1, keepdim=True))
        normed = reference.rms_norm(x, scale, 1e-6)
        gated = linear(x, weight, epilogue=GATED, workspace=workspace)
        expected = reference.gated_mul((x.double() @ exact.T).to(dtype))
        torch.testing.assert_close(gated, expected, **tolerance)
        gated = linear(x, weight, epilogue=GATED, norm=norm, workspace=workspace)
        expected = reference.gated_mul((normed.double() @ exact.T).to(dtype))
        torch.testing.assert_close(gated, expected, rtol=0.02, atol=0.02)
        out = linear(x, weight, norm=norm, workspace=workspace)
        wide = normed.double() @ exact.T
        torch.testing.assert_close(out.double(), wide, rtol=0.02, atol=0.02)
        residual = random(m, 2 * size, dtype=dtype)
        total = residual.double() + (x.double() @ exact.T).to(dtype).double()
        squares = linear(x, weight, epilogue=Epilogue(residual=residual), workspace=workspace)
        torch.testing.assert_close(residual.double(), total, **tolerance)
        torch.testing.assert_close(
            squares.sum(1), residual.float().square().sum(1), rtol=1e-4, atol=1e-2
        )


@pytest.mark.parametrize("kind", ["int4, 128", "int4, 128, zeros", "e4m3, blocks", "nvfp4"])
def test_a_product_at_any_number_of_rows(kind: str) -> None:
    """1 to 16,384: the same values of W, so that rows do not depend on their company beyond the
    order of sums."""
    n, k = 2048, 1024
    weight, exact = make(kind, n, k, torch.bfloat16)
    owner = GivenWords(weight, torch.bfloat16)
    weight_only_product.share_kernels([owner], torch.bfloat16, GPU)
    assert owner.kernels is not None
    every_x = random(16384, k, dtype=torch.bfloat16)
    expected = every_x.double() @ exact.T
    for m in (0, 1, 8, 128, 129, 1536, 1537, 8192, 16384):
        assert_rounded(owner(every_x[:m]), expected[:m]) if m else owner(every_x[:0])
    out = owner.add_to(every_x[:64], torch.zeros(64, n, device=GPU, dtype=torch.bfloat16))
    assert_rounded(out.rows, expected[:64])


@pytest.mark.parametrize("kind", ["int4, 128", "int4, 32, zeros", "e4m3, blocks", "nvfp4"])
@pytest.mark.parametrize(("size", "biased"), [(2048, True), (3072, False)])
def test_a_product_with_a_dense_copy(size: int, biased: bool, kind: str) -> None:
    """To the bit as a dense product with more rows than the bound, and as before with fewer."""
    dtype = torch.bfloat16
    (up_words, up), (words, exact) = (make(kind, n, size, dtype) for n in (2 * size, size))
    biases = [random(n, dtype=dtype) if biased else None for n in (2 * size, size)]

    def quantised() -> list[GivenWords]:
        pairs = zip((up_words, words), biases, strict=True)
        return [GivenWords(given, dtype, bias) for given, bias in pairs]

    plain, copied = quantised(), quantised()
    for products in (plain, copied):
        select_product.share_kernels(products, dtype, GPU)
        select_product.prepare(products, dtype, dense_copies=products is copied)
    dense = [DenseProduct(w.to(dtype), b) for w, b in zip((up, exact), biases, strict=True)]
    select_product.share_kernels(dense, dtype, GPU)
    for product, expected in zip(copied, dense, strict=True):
        assert product.dense is not None
        assert torch.equal(product.dense.weight, expected.weight)
        assert product.kernels is not None and product.kernels.dequantized is None
    norm = GivenNorm(random(size, dtype=dtype))

    def results(products: Sequence[Product], x: Tensor) -> list[Tensor]:
        first, second = products
        hidden, rows = first.gated_mul_of_norm(Residual(x.clone()), norm, second)
        added = second.add_to(hidden, rows)
        normed, rows = first.of_norm(added, norm)
        return [second(x), hidden, normed, rows]

    bound = H200.weight_only_dense_rows
    every_x = random(2048, size, dtype=dtype)
    wide = every_x.double() @ exact.T
    if biases[1] is not None:
        wide += biases[1].double()
    for m in (0, 1, bound, bound + 1, 128, 256, 2048):
        x = every_x[:m]
        torch.cuda.synchronize()
        found = results(copied, x)
        same = results(plain if m <= bound else dense, x)
        assert all(torch.equal(*pair) for pair in zip(found, same, strict=True)), m
        torch.testing.assert_close(found[0].double(), wide[:m], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dense_copies", [False, True])
@pytest.mark.parametrize("kind", ["int4, 128", "int4, 32, zeros", "e4m3, rows", "nvfp4"])
def test_a_captured_layer(kind: str, dense_copies: bool) -> None:
    """Two products in a row, few rows and many, replayed with other rows."""
    size, dtype = 1024, torch.bfloat16
    first, second = (GivenWords(make(kind, n, size, dtype)[0], dtype) for n in (2 * size, size))
    select_product.share_kernels([first, second], dtype, GPU)
    select_product.prepare([first, second], dtype, dense_copies=dense_copies)
    norm = GivenNorm(random(size, dtype=dtype))

    def layer(rows: Tensor) -> Tensor:
        x, rows = first.gated_mul_of_norm(Residual(rows), norm, second)
        left = second.add_to(x, rows)
        return left.rows if left.delta is None else left.rows + left.delta

    for m in (1, 32, 96, 97, 200, 1700):
        held = random(m, size, dtype=dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(held.clone())
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = layer(held.clone())
        for _ in range(3):
            held.copy_(random(m, size, dtype=dtype))
            expected = layer(held.clone())
            graph.replay()
            assert torch.equal(out, expected)


class GivenNorm:
    """The parameters of an RMS norm."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.eps = 1e-6


def test_a_prepared_layer_gives_back_the_memory_of_the_scales() -> None:
    scheme = CompressedInt4(group_size=128, scale_dtype=torch.bfloat16)
    format = WeightFormat(torch.bfloat16, scheme, lambda name: scheme)
    with GPU:
        layer = Linear(whole(5120), {"map": whole(7168)}, format)
    assert isinstance(layer.product, weight_only_product.WeightOnlyInt4Product)
    weight = layer.product.weight
    weight.data.random_(-(2**15), 2**15)
    weight.scale.uniform_(0.01, 0.02)
    num_bytes = weight.scale.nbytes
    weight_only_product.share_kernels([layer.product], torch.bfloat16, GPU)
    x = random(3, 5120, dtype=torch.bfloat16)
    expected = layer(x)  # has made what the kernels read
    before = torch.cuda.memory_allocated(GPU)
    del weight
    layer.product.prepare(torch.bfloat16)
    layer.register_weights()
    assert before - torch.cuda.memory_allocated(GPU) >= num_bytes
    assert torch.equal(layer(x), expected)
