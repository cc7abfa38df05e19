"""Checks of the expert kernels, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.moe import reference as experts
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import (
    ByRouter,
    Chosen,
    Clamped,
    ExpertBiases,
    ExpertWeights,
    Routing,
)
from minisgl.kernels.moe.routing import topk_softmax
from minisgl.kernels.tuning import ExpertTiles, FewTiles, ManyTiles, tuning_of

MAX_FEW_ROWS = 16
CLAMPED = Clamped(limit=0.8, alpha=1.702)  # many gates and ups exceed it

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 2e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
}


def random_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    clamped: bool = False,
) -> ExpertWeights:
    gate_up = torch.randn(num_experts, 2 * size, hidden_size, device=device) / hidden_size**0.5
    down = torch.randn(num_experts, hidden_size, size, device=device) / size**0.5
    weights = ExpertWeights(gate_up.to(dtype), down.to(dtype))
    return with_biases(weights) if clamped else weights


def with_biases(weights: ExpertWeights) -> ExpertWeights:
    """As gpt-oss has them."""
    num_experts, hidden_size, size = weights.down.shape
    biases = ExpertBiases(
        torch.randn(num_experts, 2 * size).to(weights.down),
        torch.randn(num_experts, hidden_size).to(weights.down),
    )
    return weights._replace(biases=biases, clamped=CLAMPED)


def random_logits(
    num_rows: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Distinct within a row: the reference leaves the order of equal logits open."""
    order = torch.stack([torch.randperm(num_experts) for _ in range(num_rows)])
    return (order.float() / 16 - 3).to(dtype).to(device)


def ways(num_rows: int, weights: ExpertWeights, top_k: int) -> list[FewTiles | ManyTiles]:
    """Tiles for this number of rows, for many and, where applicable, for few."""
    few = FewTiles(ExpertTiles(16, 16, 64, num_warps=4, num_stages=3), block_n=4, block_k=64)
    room = tuning_of(weights.down.device)
    return [
        *([few] if num_rows <= MAX_FEW_ROWS else []),
        choose_tiles(num_rows, weights, top_k, weights.down.dtype, room),
        choose_tiles(max(num_rows, 1000), weights, top_k, weights.down.dtype, room),
    ]


def check_choose(
    num_rows: int,
    num_experts: int,
    routing: Routing,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
) -> None:
    logits = random_logits(num_rows, num_experts, dtype, device)
    for scales in (None, (1 + torch.rand(num_experts)).to(dtype).to(device)):
        chosen, weights = topk_softmax(logits, routing, scales, pdl=pdl)
        wanted, wanted_weights = experts.topk_softmax(logits, routing, scales)
        assert torch.equal(chosen, wanted)
        torch.testing.assert_close(weights, wanted_weights, **TOLERANCES[dtype])


def check_equals(device: torch.device, *, pdl: bool) -> None:
    """Among equal logits the lower expert comes first."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [1.0] * 6], device=device)
    chosen, _ = topk_softmax(logits, Routing(4, normalize=True), pdl=pdl)
    assert chosen.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]


def check_nan(
    num_rows: int, num_experts: int, routing: Routing, *, device: torch.device, pdl: bool
) -> None:
    """A row of NaN chooses existing experts and changes no other row."""
    hidden_size, size = 48, 24
    weights = random_experts(num_experts, hidden_size, size, torch.float32, device)
    x = torch.randn(num_rows, hidden_size, device=device)
    logits = torch.randn(num_rows, num_experts, device=device)
    x[1:], logits[1] = float("nan"), float("inf")
    logits[2:] = float("nan")
    chosen, shares = topk_softmax(logits, routing, pdl=pdl)
    assert int(chosen.min()) >= 0 and int(chosen.max()) < num_experts
    assert all(len(set(row)) == routing.top_k for row in chosen.tolist())
    assert shares[1:].isnan().all()
    wanted = experts.fused_experts(x[:1], weights, Chosen(chosen[:1], shares[:1]))
    for how in ways(num_rows, weights, routing.top_k):
        out, _ = fused_experts(x, ByRouter(logits, routing), weights, tiles=how, pdl=pdl)
        torch.testing.assert_close(out[:1], wanted, **TOLERANCES[torch.float32])
        assert out[1:].isnan().all()


def check_mix(
    num_rows: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pdl: bool,
    crowded: bool = False,
    clamped: bool = False,
    gelu: bool = False,
) -> None:
    """crowded: whether all rows choose the same experts. clamped: as in gpt-oss, with biases.
    gelu: as in Gemma 4, with scales of the experts."""
    routing = Routing(top_k, normalize=True)
    weights = random_experts(num_experts, hidden_size, size, dtype, device, clamped=clamped)
    weights = weights._replace(gelu=gelu)
    scales = (1 + torch.rand(num_experts)).to(dtype).to(device) if gelu else None
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = random_logits(num_rows, num_experts, dtype, device)
    if crowded:
        logits = logits[:1].expand(num_rows, -1).contiguous()
    choice, first = ByRouter(logits, routing, scales), ByRouter(logits[:1], routing, scales)
    wanted = experts.fused_experts(x, weights, choice)
    stream = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    for how in ways(num_rows, weights, routing.top_k):
        out, squares = fused_experts(x, choice, weights, tiles=how, pdl=pdl)
        assert squares is None
        torch.testing.assert_close(out, wanted, **TOLERANCES[dtype])
        # A row's sum is the same alone, bit for bit.
        alone, _ = fused_experts(x[:1], first, weights, tiles=how, pdl=pdl)
        assert torch.equal(alone, out[:1])

        # The same experts, given.
        given = Chosen(*topk_softmax(logits, routing, scales, pdl=pdl))
        again, _ = fused_experts(x, given, weights, tiles=how, pdl=pdl)
        assert torch.equal(again, out)

        rows = stream.clone()
        added, squares = fused_experts(x, choice, weights, rows, tiles=how, pdl=pdl)
        assert added is rows and torch.equal(rows, (stream.float() + out.float()).to(dtype))
        assert squares is not None and len(squares) == num_rows
        torch.testing.assert_close(squares.sum(1), rows.float().square().sum(1))
