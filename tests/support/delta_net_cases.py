"""Random inputs of the operations of a gated delta net, and what they compute, token by token in
float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.gated_delta.reference import DeltaRows, Gates
from minisgl.kernels.segments import Runs, Segments

# Source, slot and number of rows. The longest crosses chunks of 64 rows; one has no row; one starts
# from another's snapshot; three continue one another through a snapshot in slot 1.
SEGMENTS = (
    (4, 4, 1),
    (6, 6, 64),
    (2, 1, 63),
    (1, 2, 2),
    (2, 2, 65),
    (7, 0, 130),
    (7, 3, 5),
    (5, 5, 0),
    (9, 9, 0),
)
NUM_SLOTS = 9  # slot 9 is scratch
UNREAD = 3  # rows after the last segment


def segments_of(
    device: torch.device | str = "cpu", segments: Sequence[tuple[int, int, int]] = SEGMENTS
) -> Segments:
    sources, slots, lengths = torch.tensor(segments, device=device).T
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return Segments(sources.contiguous(), slots.contiguous(), starts)


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer."""

    k: int = 2
    v: int = 6
    key_dim: int = 32
    value_dim: int = 16

    @property
    def channels(self) -> int:
        return 2 * self.k * self.key_dim + self.v * self.value_dim


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values are columns of one tensor, as a convolution leaves them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    state: Tensor

    @property
    def rows(self) -> DeltaRows:
        return DeltaRows(self.q, self.k, self.v, self.gates)

    @staticmethod
    def draw(num_rows: int, heads: Heads, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        """Keys resemble one another, and the decay is between almost nothing and almost all, so
        that each row depends on many before it."""
        torch.manual_seed(num_rows)
        mixed = torch.randn(num_rows, heads.channels) + 0.5 * torch.randn(heads.channels)
        mixed = mixed.to(device, dtype)
        sizes = (heads.k * heads.key_dim, heads.k * heads.key_dim, heads.v * heads.value_dim)
        q, k, v = mixed.split(sizes, dim=1)
        a, b = torch.randn(num_rows, 2 * heads.v).to(device, dtype).chunk(2, dim=1)
        a_log = torch.linspace(-6, 3, heads.v).to(device)
        gates = Gates(a, b, a_log, torch.randn(heads.v).to(device, dtype))
        state = torch.randn(NUM_SLOTS + 1, heads.v, heads.key_dim, heads.value_dim).to(device)
        return Inputs(
            q=q.unflatten(1, (heads.k, heads.key_dim)),
            k=k.unflatten(1, (heads.k, heads.key_dim)),
            v=v.unflatten(1, (heads.v, heads.value_dim)),
            gates=gates,
            state=state,
        )


def recurrence(inputs: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """The results and the states after them, in float64 on the CPU: each token's update written as
    a product with a matrix."""
    gates = inputs.gates
    parts = (inputs.q, inputs.k, inputs.v, gates.a, gates.a_log, gates.dt_bias, inputs.state)
    q, k, v, a, a_log, dt_bias, state = (part.double().cpu() for part in parts)
    group, identity = v.shape[1] // k.shape[1], torch.eye(k.shape[2], dtype=torch.double)
    strengths = gates.b.sigmoid().double().cpu()  # rounded
    out = torch.full_like(v, torch.nan)
    starts = segments.row_starts.tolist()
    for index, (source, slot) in enumerate(zip(segments.sources, segments.slots, strict=True)):
        current = state[source].clone()
        for row in range(starts[index], starts[index + 1]):
            for head in range(v.shape[1]):
                key, query = k[row, head // group], q[row, head // group]
                key = key / (key.square().sum() + 1e-6).sqrt()
                query = query / (query.square().sum() + 1e-6).sqrt() / k.shape[2] ** 0.5
                rate = (1 + (a[row, head] + dt_bias[head]).exp()).log()
                decay, strength = (-a_log[head].exp() * rate).exp(), strengths[row, head]
                forget = decay * (identity - strength * key.outer(key))
                current[head] = forget @ current[head] + strength * key.outer(v[row, head])
                out[row, head] = query @ current[head]
        state[slot] = current
    return out, state


def relative_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


RUN_SLOTS = (5, NUM_SLOTS, 0, 8)


def runs_of(size: int, num_kept: Sequence[int], device: torch.device | str = "cpu") -> Runs:
    slots = torch.tensor(RUN_SLOTS, device=device)
    return Runs(slots, torch.tensor(num_kept, dtype=torch.int32, device=device), size)
