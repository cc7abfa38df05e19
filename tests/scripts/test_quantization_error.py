"""The table of errors: each format rounds as it says, and the worse of two formats is known."""

from __future__ import annotations

import quantization_error
import torch
from quantization_error import FORMATS, by_block, by_group, by_row, by_tensor, in_int4, table


def test_fp8_keeps_the_numbers_that_it_has() -> None:
    exact = torch.tensor([448.0, -416.0, 1.0, 0.0625, 0.0, -(2.0**-9)]).repeat(128, 64)
    for rounded in (by_tensor, by_row, by_group, by_block):
        assert torch.equal(rounded(exact), exact)


def test_scales_are_of_what_shares_them() -> None:
    """A number of a thousand loses the small ones that share its scale, and no others."""
    x = torch.full((256, 256), 2.0**-9)
    x[0, 0] = 448.0 * 128

    def lost(rounded: torch.Tensor) -> int:
        assert rounded[0, 0] == x[0, 0]
        return int((rounded != x).sum())

    assert lost(by_tensor(x)) == 256 * 256 - 1
    assert lost(by_row(x)) == 255
    assert lost(by_group(x)) == 127
    assert lost(by_block(x)) == 128 * 128 - 1


def test_int4_keeps_sixteen_numbers_of_a_group() -> None:
    numbers = torch.arange(256).remainder(16).float().repeat(2, 1)
    with_zeros = (numbers - 5) * 0.25  # -1.25 to 2.5
    assert torch.equal(in_int4(with_zeros, zero_points=True), with_zeros)
    symmetric = numbers - 7.5  # of which the scale is 1, and the nearest numbers are whole
    expected = symmetric.round().clamp(-8, 7)
    assert torch.equal(in_int4(symmetric, zero_points=False), expected)


def test_formats_with_fewer_bits_lose_more() -> None:
    lines = [*table(rows=16, outputs=128, inputs=512)]
    assert lines == [*table(rows=16, outputs=128, inputs=512)], "the table is that of its sizes"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in cells] == [each.name for each in FORMATS]
    of_weights = [float(row[1].rstrip("%")) for row in cells]
    assert of_weights[0] < 0.5 < min(of_weights[1:4]) < 4 < min(of_weights[4:])
    assert max(of_weights) < 25
    for row in cells[1:4]:
        assert float(row[1].rstrip("%")) < float(row[2].rstrip("%"))
    assert [row[2] for row in cells[4:]] == ["", ""], "INT4 leaves x as it is"


def test_outlier_channels_are_the_same_for_every_token() -> None:
    x = quantization_error.with_outliers(torch.ones(8, 400))
    assert x.unique().tolist() == [1.0, 20.0]
    assert (x[0] == 20.0).sum() == 4
    assert bool((x == x[0]).all())
