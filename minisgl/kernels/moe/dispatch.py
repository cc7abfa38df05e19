"""What a mixture of experts computes behind its router: by Triton where it runs, or else by the
reference."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.dispatch import Residual, runs_triton
from minisgl.kernels.moe.reference import (
    ExpertWeights,
    Routing,
    apply_reference,
    choose_reference,
)


def mix(x: Tensor, logits: Tensor, experts: ExpertWeights, routing: Routing) -> Tensor:
    """The weighted sum over each row's chosen experts e of down[e] · silu_mul(gate_up[e] · x).

    x: [num_rows, hidden_size]; logits: [num_rows, num_experts], the router's. Returns a new tensor
    like x.
    """
    if runs_triton(x.device):
        from minisgl.kernels.moe import launch

        return launch.mix(x, logits, experts, routing)[0]
    return apply_reference(x, experts, *choose_reference(logits, routing))


def mix_add(
    x: Tensor, logits: Tensor, experts: ExpertWeights, routing: Routing, rows: Tensor
) -> Residual:
    """rows + mix(...), which may be written over `rows`."""
    if runs_triton(x.device):
        from minisgl.kernels.moe import launch

        rows, squares = launch.mix(x, logits, experts, routing, rows)
        return Residual(rows, squares=squares)
    return Residual(rows, delta=mix(x, logits, experts, routing))
