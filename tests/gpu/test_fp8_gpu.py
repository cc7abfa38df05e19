"""FP8 products at the sizes of real models, against float64; and the rounding of activations in
bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.fp8_cases import E4M3, assert_product, bits, expected_rows
from support.fp8_layers import check_overlap

from minisgl.config import Activations
from minisgl.kernels.elementwise import norm
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.quantize import (
    quantize,
    rms_norm_quantize,
)
from minisgl.kernels.fp8_rows import room
from minisgl.kernels.linear.fp8 import scaled_mm
from minisgl.kernels.linear.fp8.fp8_gemm import linear
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
from minisgl.kernels.linear.fp8.fp8_tiles import allocate_workspace
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.linear.tiles import LinearWorkspace
from minisgl.kernels.residual import Residual

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
LARGE = [  # n, k
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (10240, 5120), (5120, 8192),
]  # fmt: skip
SMALL = [(4096, 1024), (1024, 3072), (1000, 896), (48, 160), (37, 100)]
USUAL: list[tuple[int, int] | None] = [None, (128, 128)]
CASES = [
    *((*shape, block) for shape in LARGE for block in USUAL),
    *((*shape, block) for shape in SMALL for block in (*USUAL, (64, 64), (32, 16))),
]
ROWS = [1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256]
MANY = [257, 1000, 4096, 16384]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16)


def weights(n: int, k: int, block: tuple[int, int] | None) -> Fp8Weights:
    """Of sizes such that y is some 1."""
    shape = (n,) if block is None else (-(-n // block[0]), -(-k // block[1]))
    scale = (0.5 + torch.rand(shape, device=GPU)) / (100 * k**0.5)
    # Past 448 torch writes NaN.
    return Fp8Weights((random(n, k) * 100).clamp(-448, 448).to(E4M3), scale, block)


def workspace(w: Fp8Weights) -> LinearWorkspace:
    return allocate_workspace([(*w.data.shape, w.group)], GPU)


@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("size", [100, 1024, 5120, 8192])
def test_rounding(size: int, group: int | None) -> None:
    """As a kernel that writes the same in bfloat16, and then the rounding."""
    weight, static = random(size), torch.tensor([0.02], device=GPU)
    for m in (1, 3, 17, 256, 1023, 16384):
        x, delta, gate_up = random(m, size), random(m, size), random(m, 2 * size)
        x[0] = 0
        for scales in ((group, None), (None, static)):
            torch.cuda.synchronize()
            total = x.clone()
            cases = [
                (quantize(x, *scales), x),
                (rms_norm_quantize(x, None, weight, 1e-6, *scales), norm.rms_norm(x, weight, 1e-6)),
                (quantize(gate_up, *scales, gated=True), gated_mul(gate_up)),
                (
                    rms_norm_quantize(total, delta, weight, 1e-6, *scales),
                    norm.add_rms_norm(delta, x.clone(), weight, 1e-6)[0],
                ),
            ]
            assert torch.equal(total, x + delta)
            for i, (found, wide) in enumerate(cases):
                x8, scale = expected_rows(wide, *scales)
                differ = (bits(found.data) != bits(x8)).float().mean()
                if i in (0, 2):
                    assert differ == 0 and torch.equal(found.scale, scale)
                else:  # sums of squares in another order may turn either rounding of a value
                    assert differ < 0.02 + 1.01 / m
                    torch.testing.assert_close(found.scale, scale, rtol=2**-6, atol=0)
                    assert (found.scale != scale).float().mean() < 0.02 + 1.01 / m


@pytest.mark.parametrize(("n", "k", "block"), CASES)
def test_our_kernel(n: int, k: int, block: tuple[int, int] | None) -> None:
    w, bias = weights(n, k, block), random(n)
    place, every_x = workspace(w), random(max(ROWS), k)
    for m in ROWS:
        x = quantize(every_x[:m], w.group)
        x.data.as_strided((room(m) - m, k), (k, 1), m * k).view(torch.uint8).fill_(0x7F)
        torch.cuda.synchronize()
        y = linear(x, w, bias, workspace=place)
        assert_product(y, x, w, bias)
        assert torch.equal(y, linear(x, w, bias, workspace=place, pdl=False))
        assert_product(linear(x, w, None), x, w)
    assert not place.semaphores.any()


@pytest.mark.parametrize("m", MANY)
@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize(("n", "k"), [(7168, 5120), (5120, 17408), (1024, 3072), (640, 512)])
def test_many_rows(n: int, k: int, block: tuple[int, int] | None, m: int) -> None:
    w = weights(n, k, block)
    x = quantize(random(m, k), w.group)
    torch.cuda.synchronize()
    assert_product(linear(x, w, None, workspace=workspace(w)), x, w)
    if torch.cuda.get_device_capability(GPU) == (9, 0):
        assert scaled_mm.takes(x, w, None)
    if scaled_mm.takes(x, w, None):
        assert_product(scaled_mm.linear(x, w, None), x, w)
    bias = random(n)
    if scaled_mm.takes(x, w, bias):
        assert_product(scaled_mm.linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_sums_are_exact_where_tensor_cores_lose_bits(block: tuple[int, int] | None) -> None:
    """One large product at the start of each row, and then thousands of small ones."""
    n, k = 256, 16384
    data = torch.ones((n, k), device=GPU)
    data[:, 0] = 448
    scale = torch.ones(n if block is None else (n // 128, k // 128), device=GPU)
    w = Fp8Weights(data.to(E4M3), scale, block)
    for m in (1, 64, 128, 512):
        rows = torch.ones((m, k), device=GPU)
        rows[:, 0] = 448
        x = quantize(rows.bfloat16(), w.group, torch.ones(1, device=GPU) if not block else None)
        torch.cuda.synchronize()
        ways = [linear(x, w, None, workspace=workspace(w))]
        if scaled_mm.takes(x, w, None):
            ways.append(scaled_mm.linear(x, w, None))
        expected = 448.0 * 448 + k - 1
        for y in ways:
            error = (y.float() - expected).abs().max() / expected
            assert error < 2**-8


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_row_is_the_same_alone_and_in_company(block: tuple[int, int] | None) -> None:
    """Rounded alike: sums differ by their order and what tensor cores cut off, and so a few results
    by a step of bfloat16."""
    w = weights(5120, 5120, block)
    product = TensorCoreProduct(w, activations=activations_of(block))
    share_kernels([product])
    x, weight = random(8192, 5120), SimpleNamespace(weight=random(5120), eps=1e-6)
    torch.cuda.synchronize()
    alone, _ = product.of_norm(Residual(x[:1]), weight)
    for m in (8, 128, 129, 8192):
        y, _ = product.of_norm(Residual(x[:m]), weight)
        torch.testing.assert_close(y[0], alone[0], rtol=2**-7, atol=2e-3)
        assert (y[0] == alone[0]).float().mean() > 0.9


def activations_of(block: tuple[int, int] | None) -> Activations:
    return Activations.TOKEN if block is None else Activations.GROUP


def layer(block: tuple[int, int] | None, size: int, inner: int) -> dict[str, TensorCoreProduct]:
    shapes = {"qkv": (size, size), "gate_up": (2 * inner, size), "down": (size, inner)}
    return {
        name: TensorCoreProduct(weights(n, k, block), activations=activations_of(block))
        for name, (n, k) in shapes.items()
    }


@pytest.mark.parametrize("m", [1, 16, 64, 200, 500])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_layers_in_a_graph(block: tuple[int, int] | None, m: int) -> None:
    """Launches that overlap give to the bit what they give one at a time."""
    size, inner = 1024, 3072
    layers = [layer(block, size, inner) for _ in range(4)]
    check_overlap(layers, random(m, size))


def test_an_empty_batch() -> None:
    products = layer((128, 128), 1024, 3072)
    share_kernels(products.values())
    weight = SimpleNamespace(weight=random(1024), eps=1e-6)
    x = random(0, 1024)
    hidden, rows = products["gate_up"].gated_mul_of_norm(Residual(x), weight, products["down"])
    assert products["down"].add_to(hidden, rows).delta is not None


def test_the_same_bits_every_time() -> None:
    for n, k in [(5120, 5120), (5120, 17408)]:
        w = weights(n, k, (128, 128))
        place = workspace(w)
        for m in (1, 32, 256):
            x = quantize(random(m, k), 128)
            torch.cuda.synchronize()
            first = linear(x, w, None, workspace=place)
            for _ in range(10):
                assert torch.equal(linear(x, w, None, workspace=place), first)
