"""The rounding to FP8 at awkward sizes: on a GPU if there is one, or else in the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

from support.fp8_cases import bits, expected_rows

from minisgl.kernels.elementwise import quantize as rounding
from minisgl.kernels.elementwise import reference
from minisgl.kernels.elementwise.activation import gated_mul
from minisgl.kernels.elementwise.quantize import (
    quantize,
    rms_norm_quantize,
)
from minisgl.kernels.fp8_rows import Fp8Rows, room
from minisgl.kernels.tuning import H200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 64), (3, 100), (17, 1300), (2, 5120)]
EPS = 1e-5


@pytest.fixture(params=["token", "group", "narrow group", "static"])
def scales(request: pytest.FixtureRequest) -> tuple[int | None, Tensor | None]:
    group = {"group": 128, "narrow group": 16}.get(request.param)
    static = torch.tensor([0.01], device=DEVICE) if request.param == "static" else None
    return group, static


def random(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, device=DEVICE).half() * torch.rand(m, 1, device=DEVICE).half() * 9
    x[0, : k // 2] = 0  # whole groups of it
    return x


def assert_rounded(found: Fp8Rows, x: Tensor, group: int | None, static: Tensor | None) -> None:
    """To the bit on the CPU if the mean of squares is exact; else a norm may round otherwise."""
    x8, scale = expected_rows(x, group, static)
    assert found.dtype == x.dtype and found.scale.shape == scale.shape
    size = x.shape[1]
    if DEVICE.type == "cpu" and size & (size - 1) == 0:
        assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, scale)
    else:
        assert (bits(found.data) != bits(x8)).float().mean() < 0.01
        torch.testing.assert_close(found.scale, scale, rtol=2e-3, atol=0)


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_rows_are_rounded_to_the_bit(
    m: int, k: int, scales: tuple[int | None, Tensor | None]
) -> None:
    x = random(m, k)
    x8, scale = expected_rows(x, *scales)
    found = quantize(x, *scales)
    assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, scale)


@pytest.mark.parametrize(("m", "k"), [*SHAPES, (3, 2048)])
def test_a_norm_is_rounded_first_to_its_dtype(
    m: int, k: int, scales: tuple[int | None, Tensor | None]
) -> None:
    # The sum of squares of small integers is the same in any order.
    x, delta = torch.randint(-9, 10, (2, m, k), device=DEVICE).half()
    weight = torch.randn(k, device=DEVICE).half()
    normed = reference.rms_norm(x, weight, EPS)
    assert_rounded(rms_norm_quantize(x, None, weight, EPS, *scales), normed, *scales)
    normed, total = reference.add_rms_norm(delta, x, weight, EPS)
    assert_rounded(rms_norm_quantize(x, delta, weight, EPS, *scales), normed, *scales)
    assert torch.equal(x, total)


@pytest.mark.parametrize(("m", "k"), SHAPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_mul_is_rounded_first_to_its_dtype(
    m: int, k: int, gelu: bool, scales: tuple[int | None, Tensor | None]
) -> None:
    gate_up = random(m, 2 * k)
    found, (x8, scale) = (
        quantize(gate_up, *scales, gated=True, gelu=gelu),
        expected_rows(gated_mul(gate_up, gelu), *scales),
    )
    assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, scale)


@pytest.mark.parametrize("most", [0, 32])
def test_long_rows_are_rounded_alike_by_several_programs_and_by_one(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = replace(H200, fp8_spread_rows=most)
    monkeypatch.setattr(rounding, "tuning_of", lambda device: tuning)
    x = random(3, 18000)
    x8, scale = expected_rows(x)
    found = quantize(x)
    assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, scale)
    found, (x8, scale) = quantize(x, gated=True), expected_rows(gated_mul(x))
    assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, scale)


def test_rows_that_lie_apart() -> None:
    wide = torch.randn(5, 300, device=DEVICE).half()
    x = wide[:, 40:160]
    assert torch.equal(bits(quantize(x).data), bits(expected_rows(x)[0]))


def test_values_past_a_static_scale_saturate() -> None:
    x = torch.tensor([[1e4, -1e4, 4.4799, 0.0]], device=DEVICE).half()
    found = quantize(x, static=torch.tensor([0.01], device=DEVICE))
    assert found.data.float().tolist() == [[448, -448, 448, 0]]
    assert found.scale.tolist() == [torch.tensor(0.01).item()]


@pytest.mark.parametrize("power", [-149, -130, -100, -41, -10, 0, 41, 100, 120])
def test_quotients_are_rounded_as_ieee_754_has_it(power: int) -> None:
    """Of all sizes of x and of scales, subnormal ones too."""
    k = 4096
    sizes = torch.randint(-20, 12, (k,)) + power
    x = torch.ldexp(torch.randn(1, k, dtype=torch.float64), sizes).float().to(DEVICE)
    x[0, :2] = torch.tensor([0.0, -0.0])
    one = torch.ldexp(1 + torch.rand(1, dtype=torch.float64), torch.tensor(power))
    for scale in (one.float().to(DEVICE), None):
        found, (x8, by) = quantize(x, static=scale), expected_rows(x, static=scale)
        assert torch.equal(bits(found.data), bits(x8)) and torch.equal(found.scale, by)


def test_scales_without_a_reciprocal() -> None:
    x = torch.tensor([[1.0, -2.0, 0.0, torch.nan]], device=DEVICE).half()
    found = quantize(x, static=torch.zeros(1, device=DEVICE)).data.float()
    assert found[0, :2].tolist() == [448, -448] and found[0, 2:].isnan().all()
    found = quantize(x, static=torch.full((1,), torch.inf, device=DEVICE)).data.float()
    assert found[0, :3].tolist() == [0, 0, 0] and found[0, 3].isnan()
    x[0, 3] = torch.inf
    found = quantize(x).data.float()
    assert found[0, :3].tolist() == [0, 0, 0] and found[0, 3].isnan()


def test_zeros_have_the_scale_one() -> None:
    x = torch.zeros(3, 256, device=DEVICE).half()
    for group in (None, 128):
        found = quantize(x, group)
        assert not found.data.float().any() and (found.scale == 1).all()


def test_nan_stays_nan_and_in_its_row() -> None:
    x = random(3, 256)
    x[1, 7] = torch.nan
    for group in (None, 128):
        found, expected = quantize(x, group), expected_rows(x, group)[0]
        assert found.data[1, 7].float().isnan()
        assert torch.equal(bits(found.data[[0, 2]]), bits(expected[[0, 2]]))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = random(40, 1300), torch.randn(1300, device=DEVICE).half()
    every = rms_norm_quantize(x, None, weight, EPS, 128)
    for row in (0, 17, 39):
        alone = rms_norm_quantize(x[row : row + 1], None, weight, EPS, 128)
        assert torch.equal(bits(alone.data[0]), bits(every.data[row]))
        assert torch.equal(alone.scale[0], every.scale[row])


def test_no_rows() -> None:
    x = torch.randn(0, 64, device=DEVICE).half()
    assert quantize(x, 16).scale.shape == (0, 4) and len(quantize(x)) == 0
    assert quantize(x, gated=True).data.shape == (0, 32)
    weight = torch.ones(64, device=DEVICE).half()
    assert rms_norm_quantize(x, None, weight, EPS).scale.shape == (0,)


def test_the_room_is_a_multiple_of_what_gemms_read() -> None:
    assert [room(m) for m in (0, 1, 16, 17, 65, 128, 129, 300)] == [
        16, 16, 16, 32, 128, 128, 132, 300,
    ]  # fmt: skip
