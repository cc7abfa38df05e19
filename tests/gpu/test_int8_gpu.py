"""INT8 at the sizes of real models: rounding and products against float64, layers in a graph, and
experts against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.fp8_cases import expected_int8
from support.fp8_expert_cases import check, check_nan
from support.fp8_layers import check_overlap

from minisgl.config import Activations
from minisgl.kernels.elementwise import norm
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.quantize import quantize, rms_norm_quantize
from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.linear.fp8.fp8_gemm import linear
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct
from minisgl.kernels.linear.fp8.fp8_tiles import allocate_workspace
from minisgl.kernels.linear.quantized import Fp8Weights

pytestmark = pytest.mark.gpu

GPU, INT8, TOKEN = torch.device("cuda", 0), torch.int8, Activations.TOKEN
SIZES = [(7168, 5120), (34816, 5120), (5120, 17408), (4096, 1024), (1000, 896), (37, 100)]
ROWS = [1, 2, 8, 9, 17, 33, 64, 65, 128, 129, 257, 1000, 4096]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16)


def weights(n: int, k: int) -> Fp8Weights:
    """Of sizes such that y is some 1."""
    data = torch.randint(-127, 128, (n, k), device=GPU).to(INT8)
    return Fp8Weights(data, (0.5 + torch.rand(n, device=GPU)) / (73 * k**0.5))


def assert_exact(y: Tensor, x: Fp8Rows, w: Fp8Weights, bias: Tensor | None) -> None:
    """One rounding away from the product of integers."""
    sums = x.data.double() @ w.data.double().T
    wanted = sums * w.scale.double() * x.scale.double()[:, None]
    wanted = wanted if bias is None else wanted + bias.double()
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("size", [100, 1024, 5120, 17408])
def test_rounding(size: int) -> None:
    weight = random(size)
    for m in (1, 3, 33, 256, 4096):
        x, delta, gate_up = random(m, size), random(m, size), random(m, 2 * size)
        x[0] = 0
        torch.cuda.synchronize()
        for found, wide in (
            (quantize(x, dtype=INT8), x),
            (quantize(gate_up, dtype=INT8, gated=True), gated_mul(gate_up)),
        ):
            x8, scale = expected_int8(wide)
            assert torch.equal(found.data, x8) and torch.equal(found.scale, scale)
        total = x.clone()
        found = rms_norm_quantize(total, delta, weight, 1e-6, dtype=INT8)
        x8, scale = expected_int8(norm.add_rms_norm(delta, x.clone(), weight, 1e-6)[0])
        assert torch.equal(total, x + delta)
        # Sums of squares in another order may turn either rounding of a value.
        assert (found.data.int() - x8.int()).abs().max() <= 2
        torch.testing.assert_close(found.scale, scale, rtol=2**-6, atol=0)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products(n: int, k: int) -> None:
    w, bias = weights(n, k), random(n)
    place, every_x = allocate_workspace([(n, k, None)], GPU), random(max(ROWS), k)
    for m in ROWS:
        x = quantize(every_x[:m], dtype=INT8)
        x.data.as_strided((room(m) - m, k), (k, 1), m * k).fill_(0x7F)
        torch.cuda.synchronize()
        y = linear(x, w, bias, workspace=place)
        assert_exact(y, x, w, bias)
        assert torch.equal(y, linear(x, w, bias, workspace=place, pdl=False))
        assert_exact(linear(x, w, None), x, w, None)
    assert not place.semaphores.any()


@pytest.mark.parametrize("m", [1, 16, 64, 500])
def test_layers_in_a_graph(m: int) -> None:
    """Launches that overlap give to the bit what they give one at a time."""
    size, inner = 1024, 3072
    shapes = {"qkv": (size, size), "gate_up": (2 * inner, size), "down": (size, inner)}
    layers = [
        {name: TensorCoreProduct(weights(*nk), activations=TOKEN) for name, nk in shapes.items()}
        for _ in range(4)
    ]
    check_overlap(layers, random(m, size))


@pytest.mark.parametrize("num_rows", [1, 8, 40, 256, 3000])
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (60, 4, 264, 96)])
def test_experts_match_the_reference(sizes: tuple[int, int, int, int], num_rows: int) -> None:
    check(num_rows, *sizes, None, TOKEN, dtype=torch.bfloat16, device=GPU, pdl=True, stored=INT8)


def test_a_nan_row_harms_no_other_row() -> None:
    check_nan(None, TOKEN, device=GPU, pdl=True, stored=INT8)
