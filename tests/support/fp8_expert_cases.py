"""Checks of the kernels for experts in FP8 and INT8, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from support.expert_cases import random_logits
from support.fp8_cases import E4M3
from torch import Tensor

from minisgl.config import Activations
from minisgl.kernels.linear.quantized import Fp8Weights
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.quantized_experts import Fp8Experts, InputScales
from minisgl.kernels.moe.reference import ByRouter, Chosen, Routing
from minisgl.kernels.moe.routing import topk_softmax
from minisgl.kernels.tuning import ManyTiles, tuning_of

# Of all rows: without rounding at all, the results are 3 % off. Where two orders of a sum round to
# different e4m3 numbers, these are 6 % apart, and so may be a row in which one of them counts most.
TOLERANCES = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}
STEP = 1 / 16
MANY_ROWS = 8  # enough for a mean
Blocks = tuple[tuple[int, int], tuple[int, int]] | None  # of gate_up, and of down


def random_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    blocks: Blocks,
    activations: Activations,
    device: torch.device,
    stored: torch.dtype = E4M3,
) -> Fp8Experts:
    gate_up, down = blocks or (None, None)

    def scales(typical: float) -> Tensor:
        return typical * (0.5 + torch.rand(num_experts, device=device))

    return Fp8Experts(
        _weights(num_experts, 2 * size, hidden_size, gate_up, device, stored),
        _weights(num_experts, hidden_size, size, down, device, stored),
        activations=activations,
        input_scales=InputScales(scales(0.02), scales(0.01))
        if activations == Activations.STATIC
        else None,
    )


def _weights(
    num_experts: int,
    n: int,
    k: int,
    block: tuple[int, int] | None,
    device: torch.device,
    stored: torch.dtype,
) -> Fp8Weights:
    shape = (n,) if block is None else (-(-n // block[0]), -(-k // block[1]))
    scale = (0.3 + torch.rand(num_experts, *shape, device=device)) / (100 * k**0.5)
    most = 448 if stored == E4M3 else 127
    data = (torch.randn(num_experts, n, k, device=device) * 100).clamp(-most, most).to(stored)
    return Fp8Weights(data, scale, block)


def ways(num_rows: int, experts: Fp8Experts, routing: Routing) -> list[ManyTiles]:
    """Tiles for this number of rows, and for many."""
    tuning = tuning_of(experts.down.data.device)
    return [
        choose_tiles(num_rows, experts, routing.top_k, torch.bfloat16, tuning),
        choose_tiles(max(num_rows, 1000), experts, routing.top_k, torch.bfloat16, tuning),
    ]


def check(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    blocks: Blocks,
    activations: Activations,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
    gelu: bool = False,
    stored: torch.dtype = E4M3,
) -> None:
    """Every way gives what the reference gives, a row alone the same bits, and added to a stream
    the rounded sum."""
    routing = Routing(top_k, normalize=True)
    experts = random_experts(num_experts, hidden_size, size, blocks, activations, device, stored)
    experts.gelu = gelu
    scales = (1 + torch.rand(num_experts, device=device)).to(dtype) if gelu else None
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = random_logits(num_rows, num_experts, dtype, device)
    stream = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    x[-1, : hidden_size // 2] = 0
    choice, first = ByRouter(logits, routing, scales), ByRouter(logits[:1], routing, scales)
    wanted = experts.reference(x, choice)
    for how in ways(num_rows, experts, routing):
        out, squares = fused_experts(x, choice, experts, tiles=how, pdl=pdl)
        assert squares is None and out.dtype == dtype
        error = (out - wanted).double().norm(dim=1) / wanted.double().norm(dim=1)
        assert float(error.max()) <= STEP, (how, float(error.max()))
        if num_rows >= MANY_ROWS or dtype == torch.float32:
            assert float(error.mean()) <= TOLERANCES[dtype], (how, float(error.mean()))
        if num_rows > 1:
            alone, _ = fused_experts(x[:1], first, experts, tiles=how, pdl=pdl)
            assert torch.equal(alone, out[:1])

        # The same experts, given.
        given = Chosen(*topk_softmax(logits, routing, scales, pdl=pdl))
        again, _ = fused_experts(x, given, experts, tiles=how, pdl=pdl)
        assert torch.equal(again, out)

        rows = stream.clone()
        added, squares = fused_experts(x, choice, experts, rows, tiles=how, pdl=pdl)
        assert added is rows and torch.equal(rows, (stream.float() + out.float()).to(dtype))
        assert squares is not None and len(squares) == num_rows
        torch.testing.assert_close(squares.sum(1), rows.float().square().sum(1))


def check_nan(
    blocks: Blocks,
    activations: Activations,
    *,
    device: torch.device,
    pdl: bool,
    stored: torch.dtype = E4M3,
) -> None:
    """A row of NaN, in x or in the logits, changes no other row."""
    routing = Routing(2, normalize=True)
    experts = random_experts(4, 128, 64, blocks, activations, device, stored)
    x, logits = torch.randn(3, 128, device=device), torch.randn(3, 4, device=device)
    clean = [
        fused_experts(x, ByRouter(logits, routing), experts, tiles=how, pdl=pdl)[0]
        for how in ways(3, experts, routing)
    ]
    x[1, 70], logits[2] = torch.nan, torch.nan
    for how, expected in zip(ways(3, experts, routing), clean, strict=True):
        out, _ = fused_experts(x, ByRouter(logits, routing), experts, tiles=how, pdl=pdl)
        assert torch.equal(out[0], expected[0]) and bool(out[1:].isnan().all())
