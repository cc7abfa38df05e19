"""The mended interpreter of Triton."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.interpreter import OncePerLaunch, fma

if torch.cuda.is_available():
    pytest.skip("with a GPU kernels are compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

import triton
import triton.language as tl
from triton.runtime import interpreter

WIDTHS = {np.float32: 32, np.float16: 16}
LARGEST = {np.float32: 2.0**60, np.float16: 2.0**7}  # so that no sum is infinite
# 2**-64 less than the middle of 1 + 2**-23 and the next float32 number, which is even. float64 has
# no place for 2**-64.
NEXT_TO_THE_MIDDLE = (1 + 2.0**-20, (1 - 2.0**-20) * 2.0**-24, 1 + 2.0**-23)


@triton.jit
def _triple(x):
    return x + x + x


@triton.jit
def _calls_kernel(out):
    for _ in range(5):
        tl.store(out, _triple(tl.load(out)))


@triton.jit
def _fma_kernel(x, y, z, out):
    tl.store(out, tl.fma(tl.load(x), tl.load(y), tl.load(z)))


@triton.jit
def _dot_kernel(x, y, out):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    place = row * 16 + column
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


@triton.jit
def _silent_kernel(x, out):
    value = tl.load(x)
    tl.store(out, (value - value).to(tl.int32))


def rounded(exact: Fraction, dtype: type[np.floating]) -> np.floating:
    """The number of the dtype next to `exact`, and of two equally near ones the even one."""
    guess = dtype(float(exact))
    near = [guess, *(np.nextafter(guess, dtype(end)) for end in (-np.inf, np.inf))]
    unsigned = np.dtype(f"u{guess.itemsize}")
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(unsigned)) & 1))


def fused(dtype: type[np.floating], x: float, y: float, z: float) -> np.ndarray:
    return fma(*(np.array([each], dtype) for each in (x, y, z)))


@pytest.mark.parametrize("dtype", WIDTHS)
@given(data=st.data())
def test_fma_is_the_exact_sum_rounded_once(dtype: type[np.floating], data: st.DataObject) -> None:
    numbers = st.floats(-LARGEST[dtype], LARGEST[dtype], width=WIDTHS[dtype])
    x, y, z = (data.draw(numbers) for _ in range(3))
    found = fused(dtype, x, y, z)
    assert found.dtype == dtype
    assert found[0] == rounded(Fraction(x) * Fraction(y) + Fraction(z), dtype)


@pytest.mark.parametrize(
    ("x", "y", "z"),
    [
        NEXT_TO_THE_MIDDLE,
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**60),
        (1.5 * 2.0**-75, 2.0**-75, 2.0**-149),  # subnormal
        (2.0**-100, 2.0**-100, -(2.0**-149)),
    ],
)
def test_fma_of_hard_numbers_is_rounded_once(x: float, y: float, z: float) -> None:
    wanted = rounded(Fraction(x) * Fraction(y) + Fraction(z), np.float32)
    assert fused(np.float32, x, y, z)[0] == wanted


def test_fma_passes_infinity_and_nan_on() -> None:
    with np.errstate(all="ignore"):
        assert fused(np.float32, np.inf, 1, 1) == np.inf
        assert fused(np.float32, 2.0**100, -(2.0**100), 1) == -np.inf
        assert np.isnan(fused(np.float32, np.inf, 1, -np.inf))


def test_a_kernel_fuses_its_products() -> None:
    x, y, z = (torch.tensor([each]) for each in NEXT_TO_THE_MIDDLE)
    _fma_kernel[(1,)](x, y, z, out := torch.empty(1))
    assert out.item() == 1 + 2.0**-23
    assert (x.double() * y + z).float() == 1 + 2.0**-22


def test_matrices_of_bfloat16_are_multiplied_as_numbers() -> None:
    x, y = torch.randn(2, 16, 16).bfloat16()
    _dot_kernel[(1,)](x, y, out := torch.empty(16, 16))
    torch.testing.assert_close(out, x.float() @ y.float())


def test_products_of_other_types_are_refused() -> None:
    x = torch.ones(1, dtype=torch.float64)
    with pytest.raises(Exception, match="float32 and float16 only"):
        _fma_kernel[(1,)](x, x, x, x)


def test_a_kernel_warns_of_no_value() -> None:
    """Warnings are errors here."""
    _silent_kernel[(1,)](torch.tensor([torch.inf]), torch.empty(1, dtype=torch.int32))


def test_a_launch_wraps_the_language_once_and_unwraps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    plain = interpreter._patch_lang
    assert isinstance(plain, OncePerLaunch)

    def patch(function: Any) -> object:
        patched.append(function.__name__)
        return plain._patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", OncePerLaunch(patch))
    own = {name: getattr(tl, name) for name in ("load", "store", "range")}
    for launches in (1, 2):
        value = torch.ones(1)
        _calls_kernel[(2,)](value)
        assert value.item() == 3.0**10
        assert patched == ["_calls_kernel"] * launches
        assert own == {name: getattr(tl, name) for name in own}


@pytest.mark.parametrize("dtype", [tl.int32, tl.float16, tl.pointer_type(tl.float32)], ids=str)
@pytest.mark.parametrize("shape", [[4], [2, 8], [tl.constexpr(8), 2], [tl.constexpr(4)]])
def test_what_a_type_says_of_a_value_is_found_once(dtype: tl.dtype, shape: list[Any]) -> None:
    """And is that of no other type with the same shape."""
    sizes = [getattr(size, "value", size) for size in shape]
    first, second = (tl.tensor(None, tl.block_type(dtype, shape)) for _ in range(2))
    assert first.shape is second.shape and first.numel is second.numel
    assert [size.value for size in second.shape] == [*second.type.shape] == sizes
    assert second.numel.value == second.type.numel == math.prod(sizes)
    assert second.dtype is second.type.element_ty is dtype
    assert str(second.type) == second.type.name and dtype.name in second.type.name
    assert interpreter._get_np_dtype(second.type) == interpreter._get_np_dtype(dtype)


def test_types_of_one_name_stay_apart() -> None:
    pointers = [tl.pointer_type(tl.float32, address_space) for address_space in (1, 3)]
    assert pointers[0].name == pointers[1].name
    assert [tl.block_type(each, [4]).element_ty.address_space for each in pointers] == [1, 3]


def test_a_number_has_no_shape_and_a_block_one_of_powers_of_2() -> None:
    number = tl.tensor(None, tl.float32)
    assert len(number.shape) == 0 and number.numel.value == 1 and number.dtype is tl.float32
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])
