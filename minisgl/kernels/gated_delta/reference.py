"""The operations of delta_net.py in torch: what a CPU runs, and what the Triton kernels are tested
against. The rounding is that of transformers, with which half-precision models were trained."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.elementwise.reference import rms_norm
from minisgl.kernels.segments import Runs, Segments

L2_EPS = 1e-6  # added to the square of the length of queries and keys


class Gates(NamedTuple):
    """What the decay of the state and the strength of its update follow from, by value head:
    exp(-exp(a_log) · softplus(a + dt_bias)) and sigmoid(b), rounded to b's dtype."""

    a: Tensor  # [num_rows, v_heads]
    b: Tensor  # [num_rows, v_heads]
    a_log: Tensor  # [v_heads]
    dt_bias: Tensor  # [v_heads]


class DeltaRows(NamedTuple):
    """Rows for the gated delta rule. Each part may be some of the columns of a wider tensor.
    v_heads is a multiple of k_heads: value head h has key head h // (v_heads // k_heads)."""

    q: Tensor  # [num_rows, k_heads, key_dim]
    k: Tensor  # [num_rows, k_heads, key_dim]
    v: Tensor  # [num_rows, v_heads, value_dim]
    gates: Gates


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, segments: Segments, *, silu: bool = True
) -> Tensor:
    out = torch.empty_like(x)
    for source, slot, rows in _by_segment(segments):
        seen = torch.cat((state[source], x[rows].T), dim=1)  # [channels, width - 1 + rows]
        state[slot] = seen[:, seen.shape[1] - state.shape[2] :]
        if rows.stop > rows.start:
            out[rows] = _convolve(seen[None], weight, silu)[0].T
    return out


def causal_conv_runs(
    x: Tensor, weight: Tensor, state: Tensor, kept: Tensor | None, runs: Runs, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    slots, size = runs.slots, runs.size

    def advance(row: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """The results of a row of each run, and what is seen of the past after it."""
        seen = torch.cat((past, row[:, :, None]), dim=2)  # [num_runs, channels, width]
        return _convolve(seen, weight, silu)[:, :, 0], seen[:, :, 1:]

    past, older, newer = state[slots], [x[:0]], list[Tensor]()
    if kept is not None:
        assert runs.num_kept is not None
        older = []
        for place, row in enumerate(kept[slots].unbind(1)):
            result, after = advance(row, past)
            older.append(result)
            past = after.where((place < runs.num_kept)[:, None, None], past)
    rows = x.unflatten(0, (-1, size))
    if kept is not None and size > 1:
        state[slots] = past
        kept[slots, :size] = rows
    for row in rows.unbind(1):
        result, past = advance(row, past)
        newer.append(result)
    if size == 1:
        state[slots] = past
    return torch.stack(older, dim=1).flatten(0, 1), torch.stack(newer, dim=1).flatten(0, 1)


def swap_rows(x: Tensor, kept: Tensor, runs: Runs) -> Tensor:
    older = kept[runs.slots]
    if runs.size > 1:
        kept[runs.slots, : runs.size] = x.unflatten(0, (-1, runs.size))
    return older.flatten(0, 1)


def _convolve(x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    result = F.conv1d(x, weight[:, None], groups=len(weight))
    return F.silu(result) if silu else result


def gated_delta_prefill(rows: DeltaRows, state: Tensor, segments: Segments) -> Tensor:
    out = torch.empty_like(rows.v, memory_format=torch.contiguous_format)
    tokens = _tokens(*rows)
    for source, slot, part in _by_segment(segments):
        current = state[source].clone()
        for row in range(part.start, part.stop):
            out[row] = _advance(current, *(of_all[row] for of_all in tokens))
        state[slot] = current
    return out


def gated_delta_runs(
    older: DeltaRows | None, newer: DeltaRows, state: Tensor, runs: Runs
) -> Tensor:
    slots, size = runs.slots, runs.size
    current = state[slots]

    def advance(rows: DeltaRows, num: int, place: int) -> Tensor:
        q, k, v, gates = rows
        parts = (part.unflatten(0, (-1, num))[:, place] for part in (q, k, v, gates.a, gates.b))
        q, k, v, a, b = parts
        return _advance(current, *_tokens(q, k, v, gates._replace(a=a, b=b)))

    if older is not None:
        assert runs.num_kept is not None
        most = len(older.v) // max(1, len(slots))
        for place in range(most):
            before = current.clone()
            advance(older, most, place)
            current = current.where(place < runs.num_kept[:, None, None, None], before)
    if size > 1:
        state[slots] = current
    out = torch.stack([advance(newer, size, place) for place in range(size)], dim=1)
    if size == 1:
        state[slots] = current
    return out.flatten(0, 1).to(newer.v.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)


class _Tokens(NamedTuple):
    """What the recurrence takes of each row and value head, in float32."""

    q: Tensor  # [num_rows, v_heads, key_dim], of length key_dim**-0.5
    k: Tensor  # [num_rows, v_heads, key_dim], of length 1
    v: Tensor  # [num_rows, v_heads, value_dim]
    decay: Tensor  # [num_rows, v_heads]
    strength: Tensor  # [num_rows, v_heads]


def _tokens(q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> _Tokens:
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(part.float()).repeat_interleave(repeats, dim=1) for part in (q, k))
    rate = F.softplus(gates.a.float() + gates.dt_bias.float())
    return _Tokens(
        q=q * q.shape[-1] ** -0.5,
        k=k,
        v=v.float(),
        decay=torch.exp(-gates.a_log.float().exp() * rate),
        strength=gates.b.sigmoid().float(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> Tensor:
    """Advances `state` [..., key_dim, value_dim] by one token in place; returns what the query
    reads of it."""
    state.mul_(decay[..., None, None])
    known = (k[..., None, :] @ state)[..., 0, :]
    change = strength[..., None] * (v - known)
    state.add_(k[..., :, None] * change[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]


def _by_segment(segments: Segments) -> list[tuple[int, int, slice]]:
    """The source, the slot and the rows of each segment, read on the host."""
    sources, slots, starts = (part.tolist() for part in segments)
    rows = (slice(*bounds) for bounds in itertools.pairwise(starts))
    return list(zip(sources, slots, rows, strict=True))
