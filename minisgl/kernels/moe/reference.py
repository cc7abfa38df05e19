"""The torch reference of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.elementwise.reference import gated_mul
from minisgl.kernels.moe.grouped import ByScores, choose_grouped
from minisgl.shards import Shard

ELSEWHERE = -1  # stands for an expert that another rank has


class Routing(NamedTuple):
    """How a row's experts follow from the router's logits."""

    top_k: int
    normalize: bool  # whether their weights add up to 1


class ByRouter(NamedTuple):
    """Which experts each row takes, as it follows from the router's logits."""

    logits: Tensor  # [num_rows, num_experts]
    routing: Routing
    scales: Tensor | None = None  # [num_experts]: multiply the weights, last of all

    @property
    def top_k(self) -> int:
        return self.routing.top_k


class Chosen(NamedTuple):
    """Which experts each row takes, as something else has chosen them. Each is there once.

    On a rank that has some of the experts these count from 0 on, and those of other ranks are
    ELSEWHERE: such pairs of a row and an expert add nothing to its sum.
    """

    experts: Tensor  # [num_rows, top_k] int32
    weights: Tensor  # [num_rows, top_k], of the dtype of the rows
    num_experts: int | None = None  # of all ranks; None: this one has them all

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]

    @property
    def dropped(self) -> Tensor | None:
        """`experts`, if some may be ELSEWHERE."""
        return None if self.num_experts is None else self.experts


Choice = ByRouter | ByScores | Chosen


def rows_held(num_rows: int, choice: Choice, num_held: int) -> int:
    """Number of rows with as many pairs as `num_rows` rows have of the `num_held` experts here, if
    they spread evenly over those of all ranks."""
    if not isinstance(choice, Chosen) or choice.num_experts is None:
        return num_rows
    return -(-num_rows * num_held // choice.num_experts)


class Clamped(NamedTuple):
    """The activation of gpt-oss in the place of silu(gate) · up: gate · sigmoid(alpha · gate) ·
    (up + 1), where the gate is at most `limit`, and up between -`limit` and `limit`."""

    limit: float
    alpha: float


class ExpertBiases(NamedTuple):
    gate_up: Tensor  # [num_experts, 2 · size], an expert's gates first
    down: Tensor  # [num_experts, hidden_size]

    @staticmethod
    def allocate(num_experts: int, hidden_size: int, size: int, dtype: torch.dtype) -> ExpertBiases:
        """Uninitialised, on torch's default device."""
        return ExpertBiases(
            torch.empty((num_experts, 2 * size), dtype=dtype),
            torch.empty((num_experts, hidden_size), dtype=dtype),
        )

    @property
    def named(self) -> dict[str, Tensor]:
        """By the names of a layer's parameters."""
        return {"gate_up_proj_bias": self.gate_up, "down_proj_bias": self.down}


class ExpertWeights(NamedTuple):
    gate_up: Tensor  # [num_experts, 2 · size, hidden_size], an expert's gates first
    down: Tensor  # [num_experts, hidden_size, size]
    biases: ExpertBiases | None = None
    clamped: Clamped | None = None  # None: silu(gate) · up
    gelu: bool = False  # gelu(gate) · up, as gated_mul of elementwise/reference.py

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down, *(self.biases or ())


class Expert(NamedTuple):
    """The maps of one expert in plain torch; their parts, so that something may be added between
    them."""

    gate_up: Callable[[Tensor], Tensor]  # [num_rows, hidden_size] → [num_rows, 2 · size]
    activated: Callable[[Tensor], Tensor]  # to [num_rows, size]
    down: Callable[[Tensor], Tensor]  # to [num_rows, hidden_size]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activated(self.gate_up(x)))


def expert_of(experts: ExpertWeights, index: int) -> Expert:
    up_bias, down_bias = (
        (None, None) if experts.biases is None else (b[index] for b in experts.biases)
    )
    return Expert(
        lambda x: F.linear(x, experts.gate_up[index], up_bias),
        lambda gate_up: activated(gate_up, experts.clamped, experts.gelu),
        lambda inner: F.linear(inner, experts.down[index], down_bias),
    )


def activated(gate_up: Tensor, clamped: Clamped | None, gelu: bool = False) -> Tensor:
    """What the second product of an expert multiplies. gate_up: [num_rows, 2 · size], the gates
    first; of the clamped kind only the result is rounded."""
    if clamped is None:
        return gated_mul(gate_up, gelu)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    product: Tensor = gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)
    return product.to(gate_up.dtype)


def topk_softmax(
    logits: Tensor, routing: Routing, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely experts of each row, and their weights.

    logits: [num_rows, num_experts]. Returns [num_rows, top_k] int32, and of the same shape and
    logits' dtype the softmax over all experts, computed in float32, normalized if the routing says
    so, and multiplied by the `scales` of the experts [num_experts].
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(routing.top_k, dim=-1)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if scales is not None:
        weights = weights * scales.float()[chosen]
    return chosen.int(), weights.to(logits.dtype)


def choose(choice: Choice) -> Chosen:
    """The experts of each row, and their weights."""
    if isinstance(choice, ByScores):
        return Chosen(*choose_grouped(choice))
    return choice if isinstance(choice, Chosen) else Chosen(*topk_softmax(*choice))


def choose_of(choice: Choice, own: Shard) -> Chosen:
    """The experts of each row as a rank sees them that has only its `own`."""
    experts, weights, _ = choose(choice)
    here = experts - own.first
    here = torch.where((here >= 0) & (here < own.size), here, ELSEWHERE)
    return Chosen(here, weights, own.whole)


def fused_experts(x: Tensor, experts: ExpertWeights, choice: Choice) -> Tensor:
    """The weighted sum over each row's chosen experts e of down[e] · gated_mul(gate_up[e] · x),
    with their biases and activation where they have others.

    x: [num_rows, hidden_size]. Returns a new tensor like x.
    """
    return weighted_sum(x, partial(expert_of, experts), choice)


def weighted_sum(x: Tensor, expert: Callable[[int], Expert], choice: Choice) -> Tensor:
    """The weighted sum over each row's chosen experts. Their results are rounded, and so are these
    times their weights, which are added in float32."""
    chosen, weights, _ = choose(choice)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in chosen[chosen != ELSEWHERE].unique().tolist():
        rows, places = (chosen == number).nonzero(as_tuple=True)
        weighted = expert(number)(x[rows]) * weights[rows, places, None]
        out.index_add_(0, rows, weighted.float())
    return out.to(x.dtype)
