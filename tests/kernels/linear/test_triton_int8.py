"""INT8 in the kernels of FP8, at awkward sizes: on a GPU if there is one, or else in the
interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.fp8_cases import expected_int8, weights

from minisgl.config import Activations
from minisgl.kernels.elementwise import quantize as rounding
from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.quantize import quantize, rms_norm_quantize
from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.linear.fp8.fp8_gemm import linear
from minisgl.kernels.linear.fp8.fp8_product import TensorCoreProduct, share_kernels
from minisgl.kernels.linear.quantized import Fp8Product
from minisgl.kernels.linear.tiles import LinearTiles, LinearWorkspace, workspace_size
from minisgl.kernels.residual import Residual
from minisgl.kernels.tuning import H200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT8 = torch.int8


def assert_rounded(found: Fp8Rows, x: torch.Tensor) -> None:
    x8, scale = expected_int8(x)
    assert found.data.dtype == INT8 and found.dtype == x.dtype
    assert torch.equal(found.data, x8) and torch.equal(found.scale, scale)


@pytest.mark.parametrize("most", [0, 32])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (3, 100), (2, 5120), (3, 9000)])
def test_rows_are_rounded_to_the_bit(
    m: int, k: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program and in several, alone and of a gated activation."""
    monkeypatch.setattr(rounding, "tuning_of", lambda _: replace(H200, fp8_spread_rows=most))
    x = torch.randn(m, 2 * k, device=DEVICE).half() * torch.rand(m, 1, device=DEVICE).half() * 9
    x[0, :k] = 0
    assert_rounded(quantize(x[:, :k].contiguous(), dtype=INT8), x[:, :k])
    assert_rounded(quantize(x, dtype=INT8, gated=True), gated_mul(x))


def test_ties_are_rounded_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.0]], device=DEVICE)
    assert quantize(x, dtype=INT8).data.tolist() == [[127, 0, 2, 2, 0, -2, -126, 0]]


def test_a_norm_is_rounded_first_to_its_dtype() -> None:
    # The sum of squares of small integers is the same in any order.
    x, delta = torch.randint(-9, 10, (2, 3, 2048), device=DEVICE).half()
    weight = torch.randn(2048, device=DEVICE).half()
    normed = reference.rms_norm(x, weight, 1e-5)
    assert_rounded(rms_norm_quantize(x, None, weight, 1e-5, dtype=INT8), normed)
    normed, total = reference.add_rms_norm(delta, x, weight, 1e-5)
    assert_rounded(rms_norm_quantize(x, delta, weight, 1e-5, dtype=INT8), normed)
    assert torch.equal(x, total)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 256), (3, 130, 100), (17, 70, 200), (65, 33, 70)]
)
def test_linear(m: int, n: int, k: int, splits: int) -> None:
    """What lies behind the rows of x counts for nothing."""
    w, bias = weights(n, k, None, DEVICE, INT8), torch.randn(n, device=DEVICE).half()
    x = quantize(torch.randn(m, k, device=DEVICE).half(), dtype=INT8)
    x.data.as_strided((room(m) - m, k), (k, 1), m * k).fill_(0x7F)
    how = LinearTiles(64, 16, 64, num_stages=2, splits=splits)
    size, counters = workspace_size(m, n, k, how)
    place = LinearWorkspace.allocate([(size, counters)], DEVICE)
    sums = x.data.double() @ w.data.double().T  # of integers, exact
    wanted = sums * w.scale.double() * x.scale.double()[:, None] + bias.double()
    for workspace in (place, place, None):
        y = linear(x, w, bias, workspace=workspace, tiles=how if workspace else None)
        torch.testing.assert_close(y.double(), wanted, rtol=2**-10, atol=1e-6)
    assert not place.semaphores.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    w, x = weights(40, 9000, None, DEVICE, INT8), torch.randn(3, 9000, device=DEVICE).half()
    weight = torch.ones(9000, device=DEVICE).half()

    def products() -> list[torch.Tensor]:
        rows = quantize(x, dtype=INT8), rms_norm_quantize(x, None, weight, 1e-6, dtype=INT8)
        return [linear(each, w, None) for each in rows]

    clean = products()
    x[1, 8900] = value
    for found, expected in zip(products(), clean, strict=True):
        assert found[1, :-1].isnan().all()  # but for the weights with the scale 0
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_product_computes_the_steps_around_it() -> None:
    size, inner, dtype = 96, 72, torch.float16
    gate_up, down = (
        TensorCoreProduct(weights(n, k, None, DEVICE, INT8), activations=Activations.TOKEN)
        for n, k in ((2 * inner, size), (size, inner))
    )
    share_kernels([gate_up, down])
    plain = [Fp8Product(each.weight, activations=Activations.TOKEN) for each in (gate_up, down)]
    norm = SimpleNamespace(weight=torch.randn(size, device=DEVICE).to(dtype), eps=1e-6)
    for m in (1, 5, 130):  # of the last, more than `fuses`
        x, delta = torch.randn(2, m, size, device=DEVICE).to(dtype)
        hidden, rows = gate_up.gated_mul_of_norm(Residual(x.clone(), delta), norm, down)
        total = x + delta
        normed = reference.rms_norm(total, norm.weight, norm.eps)
        assert torch.equal(rows, total) and isinstance(hidden, Fp8Rows)
        wanted = reference.gated_mul(plain[0](normed))
        error = hidden.data.float() * hidden.scale[:, None] - wanted.float()
        assert (error.abs().amax(1) <= hidden.scale * 1.1).all()
        again = Fp8Rows(hidden.data, hidden.scale, dtype)
        wide = (hidden.data.float() * hidden.scale[:, None]) @ plain[1].weight.dequantized().T
        torch.testing.assert_close(down(again), wide.to(dtype), rtol=2e-3, atol=1e-3)
