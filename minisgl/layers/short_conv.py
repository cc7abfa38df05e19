"""The gated short convolution of a layer, which keeps the last inputs of each request in the place
of keys and values (LFM2, arXiv 2511.23404)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.config import StateSpec
from minisgl.distributed.communicator import Communicator
from minisgl.kernels.gated_delta import delta_net
from minisgl.kernels.residual import Residual
from minisgl.layers.convolution import Convolution, runs_of
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, MergedMap, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.step import Step
from minisgl.shards import even_shard, whole

_PARTS = ("b", "c", "x")  # the gate of the inputs, that of the results, and the inputs


def state_of(channels: int, width: int, dtype: str) -> StateSpec:
    """What a request keeps: the last inputs of the convolution, in the dtype of the activations."""
    return StateSpec(
        shapes=((channels, width - 1),), dtypes=(dtype,), num_heads=channels, row_sizes=(channels,)
    )


class ShortConv(nn.Module):
    """out(c(x) · conv(b(x) · x(x))) for x the norm of the residual stream; added to the stream. A
    rank computes its share of the channels.

    `layer`: its number. `width`: of the convolution, from 2 to 4.
    """

    def __init__(
        self, hidden_size: int, layer: int, width: int, format: WeightFormat, comm: Communicator
    ) -> None:
        super().__init__()
        self._layer = layer
        channels = even_shard(hidden_size, comm.rank, comm.size)
        parts = dict.fromkeys(_PARTS, channels)
        merged = [MergedMap("in_proj", _PARTS)]
        self.in_proj = Linear(whole(hidden_size), parts, format, merged=merged)
        self.conv = Convolution([channels], width, format.dtype)
        self.out_proj = RowParallelLinear("out_proj", channels, hidden_size, format, comm)

    def forward(self, residual: Residual, norm: RMSNorm, step: Step) -> Residual:
        """Advances the states of the rows' requests."""
        rows = step.batch.own
        parts, stream = self.in_proj.product.of_norm(residual, norm, rows)
        gate, gate_of_result, x = parts.chunk(3, dim=1)
        return self.out_proj.add_to(gate_of_result * self._convolved(gate * x, step), stream, rows)

    def _convolved(self, x: Tensor, step: Step) -> Tensor:
        state, *kept = step.state(self._layer).tensors
        weight, num_decodes = self.conv.weight[:, 0], step.batch.decodes.num_rows
        parts: list[Tensor] = []
        if num_decodes:
            runs, kept_x = runs_of(step, bool(kept)), kept[0] if kept else None
            _, newer = delta_net.causal_conv_runs(
                x[:num_decodes], weight, state, kept_x, runs, silu=False
            )
            parts.append(newer)
        if num_decodes < len(x):
            segments = step.batch.slots.segments
            parts.append(
                delta_net.causal_conv(x[num_decodes:], weight, state, segments, silu=False)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
