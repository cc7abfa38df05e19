"""The arithmetic of quantised products: rounding of x, dequantised weights, and their layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import (
    E4M3,
    Fp8Product,
    Fp8Weights,
    Int4Product,
    Int4Weights,
    pack_int4,
    quantize_rows,
    quantize_static,
    rounded,
    unpack_int4,
)
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales, Int4Experts
from minisgl.kernels.moe.reference import ByRouter, Routing

N, K = 192, 320  # neither is a multiple of 128
ROWS = (1, 8, 128, 129, 8192)


def random_fp8(*shape: int, block: tuple[int, int] | None) -> Fp8Weights:
    weights = Fp8Weights.allocate(*shape, block=block)
    weights.data.copy_((64 * torch.randn(shape)).clamp(-448, 448))
    weights.scale.uniform_(1e-4, 1e-3)
    return weights


def random_int4(*shape: int, group_size: int, symmetric: bool = False) -> Int4Weights:
    weights = Int4Weights.allocate(
        *shape, group_size=group_size, symmetric=symmetric, scale_dtype=torch.float16
    )
    weights.data.copy_(pack_int4(torch.randint(0, 16, shape, dtype=torch.uint8)))
    weights.scale.uniform_(1e-3, 1e-2)
    if weights.zero is not None:
        weights.zero.random_(0, 16)
    return weights


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [None, 128, 64])
def test_the_largest_of_each_row_or_group_becomes_448(
    dtype: torch.dtype, group: int | None
) -> None:
    x = torch.randn(5, K).to(dtype)
    x8, scale = quantize_rows(x, group)
    assert x8.dtype == E4M3 and scale.dtype == torch.float32 and x8.shape == x.shape
    width = group or K
    for row in range(5):
        for place, first in enumerate(range(0, K, width)):
            part = x[row, first : first + width].float()
            wanted = part.abs().max() / 448
            got = scale[row, place] if group else scale[row]
            assert got == wanted
            assert torch.equal(
                x8[row, first : first + width].float(), (part / wanted).to(E4M3).float()
            )
            assert x8[row, first : first + width].float().abs().max() == 448


def test_ties_are_rounded_to_even_and_large_values_saturate() -> None:
    x = torch.tensor([17.0, 19.0, -17.0, 1e30, -1e30, 464.0, 1e-9])
    wanted = torch.tensor([16.0, 20.0, -16.0, 448.0, -448.0, 448.0, 0.0])
    assert torch.equal(quantize_static(x, torch.tensor(1.0)).float(), wanted)


def test_zeros_have_the_scale_1_and_nan_stays_in_its_group() -> None:
    x = torch.randn(3, 256)
    x[0] = 0
    x[1, 130] = torch.nan
    x8, scale = quantize_rows(x, 128)
    assert scale[0].tolist() == [1, 1] and not x8[0].float().any()
    assert x8[1, 128:].float().isnan().all() and not x8[1, :128].float().isnan().any()
    assert not x8[2].float().isnan().any()


PRODUCTS: dict[str, Callable[[], object]] = {
    "token": lambda: Fp8Product(random_fp8(N, K, block=None), activations=Activations.TOKEN),
    "group": lambda: Fp8Product(random_fp8(N, K, block=(128, 128)), activations=Activations.GROUP),
    "static": lambda: Fp8Product(
        random_fp8(N, K, block=None),
        activations=Activations.STATIC,
        input_scale=torch.tensor(0.01),
    ),
    "none": lambda: Fp8Product(random_fp8(N, K, block=None), activations=Activations.NONE),
    "int4": lambda: Int4Product(random_int4(N, K, group_size=64)),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_row_is_the_same_in_any_company(kind: str) -> None:
    torch.manual_seed(0)
    product = PRODUCTS[kind]()
    x = torch.randn(max(ROWS), K).bfloat16()
    most = product(x)
    assert most.dtype == x.dtype and most.shape == (len(x), N)
    for num_rows in ROWS:
        if isinstance(product, Fp8Product):
            weights, scale = product.weight, product.input_scale
            group = weights.block and weights.block[1]
            few = rounded(x[:num_rows], product.activations, group, scale)
            assert torch.equal(few, rounded(x, product.activations, group, scale)[:num_rows])
        # Only the order of float32 sums may differ, and with it the last place of the result.
        torch.testing.assert_close(product(x[:num_rows]), most[:num_rows], rtol=2**-7, atol=1e-4)


def test_inputs_that_are_left_alone_are_exact() -> None:
    product = PRODUCTS["none"]()
    assert isinstance(product, Fp8Product)
    x, bias = torch.randn(3, K), torch.randn(N)
    product.bias = bias
    wanted = x.double() @ product.weight.dequantized().double().T + bias.double()
    torch.testing.assert_close(product(x).double(), wanted, rtol=1e-5, atol=1e-5)


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 128), (128, 32)])
def test_each_block_has_its_scale(block: tuple[int, int]) -> None:
    weights = random_fp8(N, K, block=block)
    w = weights.dequantized()
    for row, column in ((0, 0), (N - 1, K - 1), (127, 128), (128, 127), (64, 64)):
        scale = weights.scale[row // block[0], column // block[1]]
        assert w[row, column] == weights.data[row, column].float() * scale


def test_a_view_of_rows_takes_its_blocks_with_it() -> None:
    weights = random_fp8(N, K, block=(64, 128))
    assert torch.equal(weights.rows(64, 128).dequantized(), weights.dequantized()[64:])
    with pytest.raises(AssertionError):
        weights.rows(32, 64)


def test_the_layout_of_int4() -> None:
    """Bits 4i to 4i + 3 of element j of a chunk hold column 16 · i + j."""
    q = torch.randint(0, 16, (3, 128), dtype=torch.uint8)
    packed = pack_int4(q)
    assert packed.dtype == torch.int16 and packed.shape == (3, 32)
    for row in range(3):
        for chunk in range(2):
            for j in range(16):
                element = int(packed[row, 16 * chunk + j]) & 0xFFFF
                for i in range(4):
                    assert element >> 4 * i & 15 == q[row, 64 * chunk + 16 * i + j]
    assert torch.equal(unpack_int4(packed), q)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64])
def test_each_group_has_its_scale_and_zero_point(group_size: int, symmetric: bool) -> None:
    weights = random_int4(N, K, group_size=group_size, symmetric=symmetric)
    assert weights.group_size == group_size
    w, q = weights.dequantized(), unpack_int4(weights.data)
    for row, column in ((0, 0), (5, 31), (5, 32), (N - 1, K - 1)):
        group = column // group_size
        zero = 8 if weights.zero is None else int(weights.zero[group, row])
        wanted = (int(q[row, column]) - zero) * weights.scale[group, row].float()
        assert w[row, column] == wanted
    assert torch.equal(weights.rows(7, 20).dequantized(), w[7:27])


# -- experts --------------------------------------------------------------------------------------


def fp8_experts(activations: Activations) -> Fp8Experts:
    block = (64, 128) if activations == Activations.GROUP else None
    scales = InputScales(*torch.rand(2, 4)) if activations == Activations.STATIC else None
    return Fp8Experts(
        random_fp8(4, 128, 192, block=block),
        random_fp8(4, 192, 64, block=block),
        activations=activations,
        input_scales=scales,
    )


@pytest.mark.parametrize("kind", [*Activations, "int4"])
def test_experts_are_products_of_one_matrix_each(kind: str) -> None:
    torch.manual_seed(0)
    experts = (
        Int4Experts(random_int4(4, 128, 192, group_size=64), random_int4(4, 192, 64, group_size=32))
        if kind == "int4"
        else fp8_experts(Activations(kind))
    )
    x, logits = torch.randn(6, 192), torch.randn(6, 4)
    got = experts.reference(x, ByRouter(logits, Routing(top_k=2, normalize=False)))
    weights, chosen = logits.softmax(-1).topk(2)
    wanted = torch.zeros_like(x)
    for row in range(6):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            gate_up_of, down_of = experts.products(expert)
            gate, up = gate_up_of(x[row : row + 1]).chunk(2, dim=-1)
            wanted[row] += weight * down_of(gate * gate.sigmoid() * up)[0]
    # A last place of the inner result may be rounded to another FP8 number.
    assert relative(got, wanted) < (1e-5 if kind in ("int4", "none") else 1e-2)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
