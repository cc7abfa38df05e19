"""Checks of experts with adapters, for the interpreter and a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.expert_cases import random_logits
from support.rank_expert_cases import unwritten_is_nan
from torch import Tensor

from minisgl.kernels.adapters import ExpertAdapters, StackedAdapters
from minisgl.kernels.lora import reference as lora
from minisgl.kernels.moe.dense_experts import DenseExperts
from minisgl.kernels.moe.expert_tiles import choose_tiles
from minisgl.kernels.moe.experts_product import ExpertsProduct
from minisgl.kernels.moe.fused_experts import fused_experts
from minisgl.kernels.moe.reference import ELSEWHERE, ByRouter, Choice, Chosen, Routing, choose
from minisgl.kernels.rows import Rows
from minisgl.kernels.tuning import ManyTiles, tuning_of
from minisgl.lora.experts import AdaptedExperts

RANKS = (1, 20, 0, 48)  # of adapters 1, 2, ..; 0: it has none of experts


def padded(rank: int) -> int:
    return -(-rank // 16) * 16


def random_adapters(
    num_experts: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks_given: Sequence[int] = RANKS,
) -> ExpertAdapters:
    """With NaN wherever no kernel may read; slots have other numbers between them."""
    ranks = torch.tensor([*map(padded, ranks_given)], dtype=torch.int32, device=device)

    def stacked(num_parts: int, n: int, k: int) -> StackedAdapters:
        most = int(ranks.max())
        shape_a, shape_b = (num_parts, num_experts, most, k), (num_parts, num_experts, n, most)
        num_a, num_b = (torch.Size(shape).numel() for shape in (shape_a, shape_b))
        slots = torch.full((len(ranks), num_a + num_b + 32), torch.nan, device=device)
        a, b = slots[:, :num_a].unflatten(1, shape_a), slots[:, num_a:-32].unflatten(1, shape_b)
        for slot, rank in enumerate(ranks_given):
            a[slot, ..., : padded(rank), :] = 0
            b[slot, ..., : padded(rank)] = 0
            a[slot, ..., :rank, :] = torch.randn_like(a[slot, ..., :rank, :]) * k**-0.5
            b[slot, ..., :rank] = torch.randn_like(b[slot, ..., :rank]) * max(rank, 1) ** -0.5
        slots = slots.to(dtype)
        a, b = slots[:, :num_a].unflatten(1, shape_a), slots[:, num_a:-32].unflatten(1, shape_b)
        return StackedAdapters(a, b, ranks)

    return ExpertAdapters(stacked(2, size, hidden_size), stacked(1, hidden_size, size))


def _added(x: Tensor, weights: StackedAdapters, adapter: int, expert: int) -> Tensor:
    """What an adapter adds to the results of an expert's parts, side by side, in float64."""
    slot = adapter - 1
    rank = int(weights.ranks[slot])
    a, b = weights.a[slot, :, expert, :rank].double(), weights.b[slot, :, expert, :, :rank].double()
    return torch.cat([x.double() @ of_a.T @ of_b.T for of_a, of_b in zip(a, b, strict=True)], 1)


def expected(
    experts: ExpertsProduct, adapters: ExpertAdapters, x: Tensor, chosen: Chosen, of_rows: Tensor
) -> Tensor:
    """Row by row and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, adapter in enumerate(of_rows.tolist()):
        one = x[row : row + 1]
        numbers, shares = chosen.experts[row].tolist(), chosen.weights[row].double()
        for number, share in zip(numbers, shares, strict=True):
            if number < 0:
                continue
            gate_up, activated, down = experts.expert(number)
            found = gate_up(one)
            if adapter:
                found = (found + _added(one, adapters.gate_up, adapter, number)).to(x.dtype)
            inner = activated(found)
            y = down(inner).double()
            if adapter:
                y += _added(inner, adapters.down, adapter, number)
            out[row] += share * y[0]
    return out


def check(
    experts: ExpertsProduct,
    num_rows: int,
    num_experts: int,
    hidden_size: int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    pdl: bool,
    top_k: int = 2,
    drops: bool = False,
    as_many: int = 0,
) -> None:
    """Rows with adapters and without. tolerance: of a row. drops: other ranks have some of the
    experts. as_many: with the tiles for so many rows."""
    adapters = random_adapters(num_experts, hidden_size, size, dtype, device)
    x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
    logits = random_logits(num_rows, num_experts, dtype, device)
    choice: Choice = ByRouter(logits, Routing(top_k, normalize=True))
    if drops:
        chosen, weights, _ = choose(choice)
        chosen[::2, 0] = ELSEWHERE
        choice = Chosen(chosen, weights, num_experts + 1)
    of_rows = torch.arange(2, 3 * num_rows + 2, 3, dtype=torch.int32, device=device)
    of_rows %= len(RANKS) + 1
    wanted = expected(experts, adapters, x, choose(choice), of_rows)
    rows = Rows.of(of_rows, of_rows, lora.sort_rows(of_rows, len(RANKS)))
    assert worst(AdaptedExperts(experts, adapters).reference(x, choice, rows), wanted) < tolerance

    held = experts.experts if isinstance(experts, DenseExperts) else experts
    most, tuning = max(num_rows, as_many), tuning_of(device)
    tiles = choose_tiles(most, held, top_k, dtype, tuning, listed=True)

    def computed(of_rows: Tensor | None, tiles: ManyTiles | None = tiles) -> Tensor:
        adapted = None if of_rows is None else (adapters, of_rows)
        with unwritten_is_nan():
            return fused_experts(x, choice, held, adapted=adapted, tiles=tiles, pdl=pdl)[0]

    found, plain = computed(of_rows), computed(None)
    assert worst(found, wanted) < tolerance
    assert torch.equal(found[of_rows == 0], plain[of_rows == 0])
    # A row's bits do not depend on the adapters of others.
    others = of_rows.clone()
    others[1::2] = (others[1::2] + 2) % (len(RANKS) + 1)
    assert torch.equal(computed(others)[::2], found[::2])
    if not as_many:
        assert torch.equal(computed(of_rows, tiles=None), found)


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest error of a row."""
    error = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-3)
    return float(error.max())
