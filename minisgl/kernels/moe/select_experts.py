"""Selects what computes the experts of a layer, and what chooses among those of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.moe import reference
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.reference import Choice, Chosen
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import tuning_of
from minisgl.shards import Shard


def choose(choice: Choice) -> Chosen:
    """The experts of each row, and their weights."""
    if not isinstance(choice, Chosen) and runs_triton(choice.logits.device):
        from minisgl.kernels.moe import routing

        return routing.choose(choice)
    return reference.choose(choice)


def choose_of(choice: Choice, own: Shard) -> Chosen:
    """The experts of each row as a rank sees them that has only its `own`."""
    if not isinstance(choice, Chosen) and runs_triton(choice.logits.device):
        from minisgl.kernels.moe import routing

        return routing.choose_of(choice, own)
    return reference.choose_of(choice, own)


def weighted_sum(
    experts: ExpertsProduct, x: Tensor, choice: Choice, rows: Rows | None = None
) -> Tensor:
    """The sum that ExpertsProduct describes: a new tensor like x."""
    if not runs_triton(x.device):
        return experts.reference(x, choice, rows)
    return _fused(experts, x, choice, rows)[0]


def add_weighted_sum(
    experts: ExpertsProduct, x: Tensor, choice: Choice, stream: Tensor, rows: Rows | None = None
) -> Residual:
    """The stream with weighted_sum(...) added. May overwrite it: it is like x."""
    if not runs_triton(x.device):
        return Residual(stream, delta=experts.reference(x, choice, rows))
    stream, squares = _fused(experts, x, choice, rows, stream)
    return Residual(stream, squares=squares)


def _fused(
    experts: ExpertsProduct,
    x: Tensor,
    choice: Choice,
    rows: Rows | None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from minisgl.kernels.moe.fused_experts import fused_experts

    plain = experts.plain
    held = plain.experts if isinstance(plain, DenseExperts) else plain
    adapted = experts.adapted(rows)
    return fused_experts(x, choice, held, residual, adapted=adapted, tiles=plain.tiles)


def joins_shared(num_rows: int, device: torch.device) -> bool:
    """Whether so many rows have a shared expert computed with the others, and not beside them."""
    return num_rows <= tuning_of(device).shared_expert_rows
