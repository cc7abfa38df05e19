"""Checks of the kernels for experts in INT4, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from support.expert_cases import random_logits

from minisgl.kernels.linear.quantized import Int4Weights, pack_int4
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.quantized_experts import Int4Experts
from minisgl.kernels.moe.reference import ByRouter, Chosen, Routing
from minisgl.kernels.moe.routing import topk_softmax
from minisgl.kernels.tuning import tuning_of

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a row


def random_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    groups: tuple[int, int],
    *,
    symmetric: bool,
    device: torch.device,
) -> Int4Experts:
    """groups: columns of a group, of gate_up and of down."""

    def weights(n: int, k: int, group: int) -> Int4Weights:
        q = torch.randint(0, 16, (num_experts, n, k), dtype=torch.uint8, device=device)
        shape = (num_experts, k // group, n)
        scale = (0.5 + torch.rand(shape, device=device)) / (5 * k**0.5)
        scale *= 2 * torch.randint(0, 2, shape, device=device) - 1
        zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
        return Int4Weights(pack_int4(q), scale.half(), None if symmetric else zero)

    return Int4Experts(
        weights(2 * size, hidden_size, groups[0]), weights(hidden_size, size, groups[1])
    )


def check(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    groups: tuple[int, int],
    *,
    symmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
    gelu: bool = False,
) -> None:
    """The tiles for these rows and for many give what the reference gives, a row alone the same
    bits, and added to a stream the rounded sum."""
    routing = Routing(top_k, normalize=True)
    experts = random_experts(
        num_experts, hidden_size, size, groups, symmetric=symmetric, device=device
    )
    experts.gelu = gelu
    scales = (1 + torch.rand(num_experts, device=device)).to(dtype) if gelu else None
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = random_logits(num_rows, num_experts, dtype, device)
    stream = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    choice, first = ByRouter(logits, routing, scales), ByRouter(logits[:1], routing, scales)
    wanted = experts.reference(x, choice)
    tuning = tuning_of(device)
    hows = [choose_tiles(rows, experts, routing.top_k, dtype, tuning) for rows in (num_rows, 5000)]
    for how in dict.fromkeys(hows):
        out, squares = fused_experts(x, choice, experts, tiles=how, pdl=pdl)
        assert squares is None and out.dtype == dtype
        error = (out - wanted).double().norm(dim=1) / wanted.double().norm(dim=1)
        assert float(error.max()) <= TOLERANCES[dtype], (how, float(error.max()))
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
