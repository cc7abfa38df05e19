"""Routers that choose among groups, and the choice of the kernel beside that of the reference."""

from __future__ import annotations

import torch

from minisgl.kernels.moe import grouped
from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.kernels.moe.grouped_kernel import choose_grouped

# (experts, routing): those of GLM-4.7-Flash, DeepSeek-V3, V2 and V2-Lite, and small ones whose
# sizes are no powers of two.
ROUTINGS = [
    (64, GroupRouting(4, normalize=True, sigmoid=True, factor=1.8)),
    (256, GroupRouting(8, normalize=True, sigmoid=True, factor=2.5, num_groups=8, num_kept=4)),
    (160, GroupRouting(6, normalize=False, sigmoid=False, factor=16, num_groups=8, num_kept=3)),
    (64, GroupRouting(6, normalize=False, sigmoid=False)),
    (21, GroupRouting(5, normalize=True, sigmoid=False, factor=0.5, num_groups=3, num_kept=2)),
    (6, GroupRouting(1, normalize=False, sigmoid=True, num_groups=3, num_kept=1)),
    # With an expert that every row takes, and with several.
    (64, GroupRouting(4, normalize=True, sigmoid=True, factor=1.8, num_shared=1)),
    (10, GroupRouting(3, normalize=True, sigmoid=False, factor=0.5, num_shared=2)),
]


def check_grouped(
    num_rows: int,
    num_experts: int,
    routing: GroupRouting,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool,
) -> None:
    """Compares the weight of each expert, -1 where it is not chosen.

    All logits differ, and none is another's negative: no two experts count alike, nor two pairs."""
    generator = torch.Generator().manual_seed(num_rows + num_experts)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(-1)
    logits = ((order + 0.5) / num_experts * 7 - 3).to(dtype)
    bias = torch.rand(num_experts, generator=generator) if has_bias else None
    chosen, weights, _ = choose_grouped(
        logits.to(device), routing, None if bias is None else bias.to(device)
    )
    assert chosen.dtype == torch.int32 and weights.dtype == dtype
    wanted = grouped.choose_grouped(logits, routing, bias)
    num_shared = routing.num_shared
    assert chosen.shape == wanted.experts.shape == (num_rows, routing.top_k + num_shared)

    def spread(experts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        none = torch.full((num_rows, num_experts + num_shared), -1.0)
        return none.scatter_(1, experts.long().cpu(), values.float().cpu())

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        spread(chosen, weights), spread(*wanted[:2]), rtol=tolerance, atol=tolerance
    )
