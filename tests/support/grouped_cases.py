"""Routers that choose among groups, and the choice of the kernels beside that of the reference."""

from __future__ import annotations

import torch
from support.expert_cases import TOLERANCES, random_experts, ways
from torch import Tensor

from minisgl.kernels.moe import grouped, reference
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.grouped import ByScores, GroupRouting
from minisgl.kernels.moe.grouped_kernel import choose_grouped

# (experts, routing): those of GLM-4.7-Flash, DeepSeek-V3, V2 and V2-Lite, and ones whose sizes
# are no powers of two, or whose weights add up to less than 1.
ROUTINGS = [
    (64, GroupRouting(4, normalize=True, sigmoid=True, factor=1.8)),
    (256, GroupRouting(8, normalize=True, sigmoid=True, factor=2.5, num_groups=8, num_kept=4)),
    (160, GroupRouting(6, normalize=False, sigmoid=False, factor=16, num_groups=8, num_kept=3)),
    (64, GroupRouting(6, normalize=False, sigmoid=False)),
    (21, GroupRouting(5, normalize=True, sigmoid=False, factor=0.5, num_groups=3, num_kept=2)),
    (32, GroupRouting(4, normalize=True, sigmoid=True, least_sum=0.5)),
    (6, GroupRouting(1, normalize=False, sigmoid=True, num_groups=3, num_kept=1)),
    # With an expert that every row takes, and with several.
    (64, GroupRouting(4, normalize=True, sigmoid=True, factor=1.8, num_shared=1)),
    (10, GroupRouting(3, normalize=True, sigmoid=False, factor=0.5, num_shared=2)),
]


def logits_and_bias(
    num_rows: int, num_experts: int, dtype: torch.dtype, *, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits that differ, all of a row, and none is another's negative: no two experts count alike,
    nor two pairs of them."""
    generator = torch.Generator().manual_seed(num_rows + num_experts)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(-1)
    logits = ((order + 0.5) / num_experts * 7 - 3).to(dtype)
    return logits, torch.rand(num_experts, generator=generator) if has_bias else None


def check_grouped(
    num_rows: int,
    num_experts: int,
    routing: GroupRouting,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool,
) -> None:
    """Compares the weight of each expert, -1 where it is not chosen."""
    logits, bias = logits_and_bias(num_rows, num_experts, dtype, has_bias=has_bias)
    there = ByScores(logits.to(device), routing, None if bias is None else bias.to(device))
    chosen, weights = choose_grouped(there)
    assert chosen.dtype == torch.int32 and weights.dtype == dtype
    wanted, wanted_weights = grouped.choose_grouped(ByScores(logits, routing, bias))
    num_shared = routing.num_shared
    assert chosen.shape == wanted.shape == (num_rows, there.top_k)

    def spread(experts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        none = torch.full((num_rows, num_experts + num_shared), -1.0)
        return none.scatter_(1, experts.long().cpu(), values.float().cpu())

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        spread(chosen, weights), spread(wanted, wanted_weights), rtol=tolerance, atol=tolerance
    )


def check_experts_of(
    num_rows: int,
    num_experts: int,
    routing: GroupRouting,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool,
    pdl: bool = False,
) -> None:
    """Experts that the kernels for few rows choose themselves, as those for many rows are given;
    also in a row of NaN, whose result is NaN."""
    num_shared, hidden_size = routing.num_shared, 48
    weights = random_experts(num_experts + num_shared, hidden_size, 24, dtype, device)
    logits, bias = logits_and_bias(num_rows, num_experts, dtype, has_bias=has_bias)
    logits, bias = logits.to(device), None if bias is None else bias.to(device)
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    choice = ByScores(logits, routing, bias)
    wanted = reference.fused_experts(x, weights, choice)
    broken = choice._replace(logits=torch.full_like(logits, torch.nan))
    for how in ways(num_rows, weights, choice.top_k):
        out, _ = fused_experts(x, choice, weights, tiles=how, pdl=pdl)
        torch.testing.assert_close(out, wanted, **TOLERANCES[dtype])
        out, _ = fused_experts(x, broken, weights, tiles=how, pdl=pdl)
        assert out.isnan().all()
