"""Prints how far the product of a layer in each format is from that in float32, without a model.

    python scripts/bench/quantization_error.py

The error of y = x Wᵀ is |y - y32| / |y32| (Frobenius norms), where W, or W and x, are rounded as
the format does and everything else is float32. Two kinds of numbers: normal ones, and ones like
those of trained models: Student's t with 4 degrees of freedom, and 1 % of the columns of x, the
outlier channels, 20 times as large. Every format is rounded to nearest, without calibration: what a
calibrated checkpoint (AWQ, GPTQ) loses is less than INT4 shows here. Runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.config import BLOCK, Activations
from minisgl.kernels.linear.quantized import (
    E4M3_MAX,
    Fp8Weights,
    Int4Weights,
    dequantize,
    pack_int4,
    quantize_rows,
    rounded,
)

ROWS, OUTPUTS, INPUTS = 256, 1024, 4096
FREEDOM = 4  # degrees of freedom of Student's t
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 20.0

Round = Callable[[Tensor], Tensor]


def by_tensor(x: Tensor) -> Tensor:
    """A scale for all of x: what a static scale is at best."""
    return rounded(x, Activations.STATIC, None, x.abs().amax() / E4M3_MAX)


def by_row(x: Tensor) -> Tensor:
    """A scale for each token of x, or each output channel of W."""
    return rounded(x, Activations.TOKEN, None, None)


def by_group(x: Tensor) -> Tensor:
    """A scale for each 128 columns of a token."""
    return rounded(x, Activations.GROUP, BLOCK, None)


def by_block(weight: Tensor) -> Tensor:
    """A scale for each 128 x 128 weights."""
    grid = (weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    blocks = weight.view(grid).transpose(1, 2).flatten(2)
    data, scale = quantize_rows(blocks)
    data = data.unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).reshape(weight.shape)
    return dequantize(Fp8Weights(data, scale, (BLOCK, BLOCK)))


def in_int4(weight: Tensor, *, zero_points: bool) -> Tensor:
    """Sixteen numbers with a bfloat16 scale for each 128 columns of a row, and maybe a zero."""
    groups = weight.unflatten(-1, (-1, BLOCK))
    if zero_points:
        low = groups.amin(-1).clamp(max=0)
        scale = ((groups.amax(-1).clamp(min=0) - low) / 15).bfloat16()
        zero = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()
        zero = torch.full_like(scale, 8.0)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    packed = pack_int4(q.to(torch.uint8).flatten(-2))
    zeros = zero.to(torch.uint8).T if zero_points else None
    return dequantize(Int4Weights(packed, scale.T, zeros))


def as_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Format(NamedTuple):
    name: str
    weight: Round
    x: Round | None  # None: not rounded


FORMATS = (
    Format("bfloat16", as_bfloat16, as_bfloat16),
    Format("FP8, blocks of 128 x 128; x per token and 128 columns", by_block, by_group),
    Format("FP8 per channel; x per token", by_row, by_row),
    Format("FP8 per tensor; x static", by_tensor, by_tensor),
    Format("INT4, groups of 128, zero points", partial(in_int4, zero_points=True), None),
    Format("INT4, groups of 128, symmetric", partial(in_int4, zero_points=False), None),
)


def heavy_tailed(rows: int, columns: int) -> Tensor:
    return torch.distributions.StudentT(torch.tensor(float(FREEDOM))).sample((rows, columns))


def with_outliers(x: Tensor) -> Tensor:
    """x with some columns that are larger than the others."""
    chosen = torch.randperm(x.shape[1])[: round(OUTLIER_SHARE * x.shape[1])]
    factors = torch.ones(x.shape[1])
    factors[chosen] = OUTLIER_FACTOR
    return x * factors


def errors(format: Format, weight: Tensor, x: Tensor) -> Iterator[str]:
    """With W rounded, and with x, too."""
    exact, stored = x @ weight.T, format.weight(weight)
    for each in (x, format.x(x) if format.x else None):
        if each is None:
            yield ""
        else:
            yield f"{float((each @ stored.T - exact).norm() / exact.norm()):.2%}"


def table(rows: int, outputs: int, inputs: int) -> Iterator[str]:
    """The lines of a Markdown table, the same for the same sizes. Sizes: multiples of 128."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds = {
            "normal": (torch.randn(outputs, inputs), torch.randn(rows, inputs)),
            "heavy tails": (
                heavy_tailed(outputs, inputs),
                with_outliers(heavy_tailed(rows, inputs)),
            ),
        }
        headings = [f"{kind}: {what}" for kind in kinds for what in ("W", "W and x")]
        yield f"| format | {' | '.join(headings)} |"
        yield f"|---|{'---|' * len(headings)}"
        for each in FORMATS:
            cells = [cell for kind in kinds.values() for cell in errors(each, *kind)]
            yield f"| {each.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(*table(ROWS, OUTPUTS, INPUTS), sep="\n")
