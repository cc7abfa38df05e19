"""Products with tuned cuBLASLt algorithms, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.kernels.linear.cublaslt import MIN_WEIGHT_BYTES, Products, load_products

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SHAPES = [(3072, 4096), (4096, 3072), (20480, 1024), (151936, 1024), (8200, 1208)]
ROWS = [1, 2, 7, 8, 9, 16, 31, 33, 48, 50, 63, 64]


def products_for(dtype: torch.dtype) -> Products:
    products = load_products(dtype, GPU)
    assert products is not None
    return products


def assert_rounded(out: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = torch.cat([x.double() @ part.double().T for part in weight.split(4096)], dim=1)
    allowed = expected.abs() * torch.finfo(out.dtype).eps * 0.51 + expected.abs().mean() * 3e-4
    assert bool(((out.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tuned_products_match_float64(n: int, k: int, dtype: torch.dtype) -> None:
    products = products_for(dtype)
    weights = [torch.randn(n, k, device=GPU, dtype=dtype) / k**0.5 for _ in range(2)]
    products.tune(weights)
    for m in ROWS:
        x = torch.randn(m, k, device=GPU, dtype=dtype)
        out = products(x, weights[1])
        assert out is not None, m
        assert_rounded(out, x, weights[1])


def test_captured_products_match_eager_ones() -> None:
    products = products_for(torch.bfloat16)
    weight = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16) / 64
    products.tune([weight])
    x = torch.empty(48, 4096, device=GPU, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products(x, weight)
    assert out is not None
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert_rounded(out, x, weight)


def test_unsuitable_products_are_left_to_torch() -> None:
    products = products_for(torch.bfloat16)
    odd = torch.randn(4099, 4096, device=GPU, dtype=torch.bfloat16)
    small = torch.randn(1024, 1024, device=GPU, dtype=torch.bfloat16)
    assert small.nbytes < MIN_WEIGHT_BYTES < odd.nbytes
    for weight in (odd, small):
        products.tune([weight])
        assert products(weight[:8], weight) is None
    assert load_products(torch.float32, GPU) is None
