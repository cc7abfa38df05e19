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
    """Rows for the gated delta rule, as `gated_delta_prefill` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    segments: Segments,
    *,
    silu: bool = True,
) -> Tensor:
    out = torch.empty_like(x)
    for source, slot, rows in _by_segment(segments):
        seen = torch.cat((state[source], x[rows].T), dim=1)  # [channels, width - 1 + rows]
        state[slot] = seen[:, seen.shape[1] - state.shape[2] :]
        if rows.stop > rows.start:
            result = _convolve(seen[None], weight, bias)[0].T
            out[rows] = F.silu(result) if silu else result
    return out


def causal_conv_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    *,
    silu: bool = True,
) -> Tensor:
    seen = torch.cat((state[slots], x[:, :, None]), dim=2)  # [num_rows, channels, width]
    state[slots] = seen[:, :, 1:]
    result = _convolve(seen, weight, bias)[:, :, 0]
    return F.silu(result) if silu else result


def causal_conv_runs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    kept: Tensor,
    runs: Runs,
    *,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    slots, size = runs.slots, runs.size
    past, own = state[slots], torch.arange(len(slots), device=x.device)

    def advance(x: Tensor, past: Tensor) -> Tensor:
        return causal_conv_decode(x, weight, bias, past, own, silu=silu)

    older: list[Tensor] = []
    for place, row in enumerate(kept[slots].unbind(1)):
        after = past.clone()
        older.append(advance(row, after))
        past = after.where((place < runs.num_kept)[:, None, None], past)
    rows = x.unflatten(0, (-1, size))
    if size > 1:
        state[slots] = past
        kept[slots, :size] = rows
    newer = [advance(row, past) for row in rows.unbind(1)]
    if size == 1:
        state[slots] = past
    return torch.stack(older, dim=1).flatten(0, 1), torch.stack(newer, dim=1).flatten(0, 1)


def swap_rows(x: Tensor, kept: Tensor, runs: Runs) -> Tensor:
    older = kept[runs.slots]
    if runs.size > 1:
        kept[runs.slots, : runs.size] = x.unflatten(0, (-1, runs.size))
    return older.flatten(0, 1)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv1d(x, weight[:, None], bias, groups=len(weight))


def gated_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Tensor, segments: Segments
) -> Tensor:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tokens = _tokens(q, k, v, gates)
    for source, slot, rows in _by_segment(segments):
        current = state[source].clone()
        for row in range(rows.start, rows.stop):
            out[row] = _advance(current, *(part[row] for part in tokens))
        state[slot] = current
    return out


def gated_delta_decode(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: Tensor, slots: Tensor
) -> Tensor:
    current = state[slots]
    out = _advance(current, *_tokens(q, k, v, gates))
    state[slots] = current
    return out.to(v.dtype)


def gated_delta_runs(older: DeltaRows, newer: DeltaRows, state: Tensor, runs: Runs) -> Tensor:
    slots, size = runs.slots, runs.size
    current, num_kept = state[slots], runs.num_kept[:, None, None, None]

    def advance(rows: DeltaRows, num: int, place: int) -> Tensor:
        q, k, v, gates = rows
        parts = (part.unflatten(0, (-1, num))[:, place] for part in (q, k, v, gates.a, gates.b))
        q, k, v, a, b = parts
        return _advance(current, *_tokens(q, k, v, gates._replace(a=a, b=b)))

    most = len(older.v) // max(1, len(slots))
    for place in range(most):
        before = current.clone()
        advance(older, most, place)
        current = current.where(place < num_kept, before)
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
