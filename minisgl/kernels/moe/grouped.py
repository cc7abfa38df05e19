"""Routers that score experts by a sigmoid, or choose among groups of experts (DeepSeek-V2, arXiv
2405.04434; DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class GroupRouting(NamedTuple):
    """How a row's experts follow from the router's logits.

    With a sigmoid, a group counts as much as its two best experts together; else, where the softmax
    over all experts is taken, as much as its best.
    """

    top_k: int
    normalize: bool  # whether their weights are made to add up to 1
    sigmoid: bool  # of each logit; else the softmax of all
    factor: float = 1.0  # multiplies the weights, last of all
    num_groups: int = 1  # of equal size, one after the other
    num_kept: int = 1  # groups, of which the experts are chosen
    least_sum: float = 1e-20  # added to the sum of weights that divides them
    # Experts behind those that are chosen among, which every row takes with weight 1.
    num_shared: int = 0


class ByScores(NamedTuple):
    """Which experts each row takes, as it follows from the logits of such a router."""

    logits: Tensor  # [num_rows, num_experts] contiguous, without the experts that every row takes
    routing: GroupRouting
    # [num_experts] float32: added to the scores where these are compared, and not to weights.
    bias: Tensor | None = None

    @property
    def top_k(self) -> int:
        return self.routing.top_k + self.routing.num_shared


def choose_grouped(choice: ByScores) -> tuple[Tensor, Tensor]:
    """The experts of each row, each of them once, and their weights; in float32 until these are
    rounded to logits' dtype."""
    logits, routing, bias = choice
    wide = logits.float()
    scores = wide.sigmoid() if routing.sigmoid else wide.softmax(-1)
    compared = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = compared.unflatten(-1, (routing.num_groups, -1))
        best = groups.topk(2 if routing.sigmoid else 1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(routing.num_kept).indices, True)
        compared = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = compared.topk(routing.top_k).indices
    weights = scores.gather(-1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.least_sum)
    shared = logits.shape[1] + torch.arange(routing.num_shared, device=logits.device)
    chosen = torch.cat((chosen, shared.expand(len(logits), -1)), 1)
    weights = F.pad(weights * routing.factor, (0, routing.num_shared), value=1.0)
    return chosen.int(), weights.to(logits.dtype)
