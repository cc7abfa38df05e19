"""The gated delta net of a layer, which keeps a state for each request in the place of keys and
values (Yang, Kautz, Hatamizadeh, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minisgl.config import StateSpec
from minisgl.distributed.communicator import Communicator
from minisgl.kernels.gated_delta import delta_net
from minisgl.kernels.gated_delta.reference import DeltaRows, Gates
from minisgl.kernels.residual import Residual
from minisgl.layers.convolution import Convolution, runs_of
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, MergedMap, RowParallelLinear, parameter
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.shards import even_shard, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """The heads of a gated delta net, and the width of the convolution before it."""

    num_key_heads: int
    num_value_heads: int  # a multiple
    key_dim: int  # of a head
    value_dim: int
    conv_width: int

    @property
    def num_keys(self) -> int:
        """The outputs of the map to queries, and of that to keys."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_dim

    def state(self, dtype: str) -> StateSpec:
        """What a request keeps: the last inputs of the convolution, in the dtype of the
        activations, and a matrix of each value head."""
        channels = 2 * self.num_keys + self.num_values
        return StateSpec(
            shapes=(
                (channels, self.conv_width - 1),
                (self.num_value_heads, self.key_dim, self.value_dim),
            ),
            dtypes=(dtype, "float32"),
            num_heads=self.num_key_heads,
            row_sizes=(channels, self.num_value_heads, self.num_value_heads),
        )


class GatedDeltaNet(nn.Module):
    """o(norm(delta(silu(conv(q(x), k(x), v(x)))), z(x))) for x the norm of the residual stream;
    added to the stream. A rank computes its share of the heads.

    `layer`: its number. `merged`: the maps of a checkpoint that have several of those to q, k, v
    and z, and to the gates.
    """

    A_log: nn.Parameter  # [value heads] float32
    dt_bias: nn.Parameter  # [value heads] float32

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        heads: DeltaHeads,
        format: WeightFormat,
        comm: Communicator,
        *,
        norm_eps: float,
        merged: Iterable[MergedMap],
    ) -> None:
        super().__init__()
        self._layer, self._heads, merged = layer, heads, tuple(merged)
        key_heads = even_shard(heads.num_key_heads, comm.rank, comm.size)
        self.value_heads = even_shard(heads.num_value_heads, comm.rank, comm.size)
        self.keys = key_heads.times(heads.key_dim)
        self.values = self.value_heads.times(heads.value_dim)
        parts = {"q": self.keys, "k": self.keys, "v": self.values, "in_proj_z": self.values}
        gates = {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}
        inputs = whole(hidden_size)
        self.in_proj = Linear(inputs, parts, format, merged=_within(parts, merged))
        self.gates = Linear(inputs, gates, format, merged=_within(gates, merged))
        convolved = (self.keys, self.keys, self.values)
        self.conv1d = Convolution(convolved, heads.conv_width, format.dtype)
        self.A_log = parameter(torch.empty(self.value_heads.size, dtype=torch.float32))
        self.dt_bias = parameter(torch.empty(self.value_heads.size, dtype=torch.float32))
        self.norm = RMSNorm(heads.value_dim, norm_eps, format.dtype)
        self.out_proj = RowParallelLinear("out_proj", self.values, hidden_size, format, comm)

    def forward(self, residual: Residual, norm: RMSNorm, step: Step) -> Residual:
        """Advances the states of the rows' requests."""
        rows = step.batch.own
        x, qkvz, stream = self.in_proj.product.of_kept_norm(residual, norm, rows)
        num_rows, num_values = len(x), self.values.size
        b, a = self.gates.product(x, rows).chunk(2, dim=1)
        gates = Gates(a, b, self.A_log, self.dt_bias)
        z = qkvz[:, -num_values:].unflatten(1, (-1, self._heads.value_dim))
        out = self._delta(qkvz[:, :-num_values], gates, step)
        out = delta_net.gated_rms_norm(out, z, self.norm.weight, self.norm.eps)
        return self.out_proj.add_to(out.view(num_rows, num_values), stream, rows)

    def _delta(self, qkv: Tensor, gates: Gates, step: Step) -> Tensor:
        """Returns [num_rows, value heads, value_dim]."""
        num_decodes, segments = step.batch.decodes.num_rows, step.batch.slots.segments
        parts: list[Tensor] = []
        if num_decodes:
            parts.append(self._delta_of_runs(qkv[:num_decodes], gates, step))
        if num_decodes < len(qkv):
            conv_states, states, *_ = step.state(self._layer).tensors
            weight, rows = self.conv1d.weight[:, 0], qkv[num_decodes:]
            convolved = delta_net.causal_conv(rows, weight, conv_states, segments)
            of_rows = gates._replace(a=gates.a[num_decodes:], b=gates.b[num_decodes:])
            newer = self._heads_of(convolved, of_rows)
            parts.append(delta_net.gated_delta_prefill(newer, states, segments))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _delta_of_runs(self, qkv: Tensor, gates: Gates, step: Step) -> Tensor:
        """As _delta, of decode rows. gates: of all rows."""
        conv_states, states, *kept = step.state(self._layer).tensors
        num_rows, weight, older = len(qkv), self.conv1d.weight[:, 0], None
        runs, kept_x = runs_of(step, bool(kept)), kept[0] if kept else None
        kept_qkv, convolved = delta_net.causal_conv_runs(qkv, weight, conv_states, kept_x, runs)
        of_rows = gates._replace(a=gates.a[:num_rows], b=gates.b[:num_rows])
        if kept:
            of_kept = gates._replace(
                a=delta_net.swap_rows(of_rows.a, kept[1], runs),
                b=delta_net.swap_rows(of_rows.b, kept[2], runs),
            )
            older = self._heads_of(kept_qkv, of_kept)
        newer = self._heads_of(convolved, of_rows)
        return delta_net.gated_delta_runs(older, newer, states, runs)

    def _heads_of(self, qkv: Tensor, gates: Gates) -> DeltaRows:
        keys, heads = self.keys.size, self._heads
        q, k, v = qkv.split((keys, keys, self.values.size), dim=1)
        return DeltaRows(
            q.unflatten(1, (-1, heads.key_dim)),
            k.unflatten(1, (-1, heads.key_dim)),
            v.unflatten(1, (-1, heads.value_dim)),
            gates,
        )


def _within(parts: Collection[str], merged: Iterable[MergedMap]) -> list[MergedMap]:
    """Those of these parts."""
    return [each for each in merged if each.parts[0] in parts]
