"""A mixture of experts whose router chooses among groups, beside experts that every row takes."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.linear.dense_product import DenseProduct
from minisgl.kernels.moe.grouped import ByScores
from minisgl.kernels.moe.select_experts import joins_shared
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.experts import ExpertsConfig, FusedExperts
from minisgl.layers.formats import WeightFormat
from minisgl.layers.linear import Linear, parameter
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.shards import whole


class GroupedMoeBlock(nn.Module):
    """The weighted sum of each row's experts, and the result of an MLP for every row, are added to
    the stream.

    An MLP as large as an expert, where no weights are quantised, is the last of the experts' stack,
    too: few rows take it as one more expert, which needs no launches of its own. `by_rank`: a
    rank has whole experts, and not a part of each.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        format: WeightFormat,
        comm: Communicator,
        *,
        by_rank: bool = False,
    ) -> None:
        super().__init__()
        assert config.routing is not None
        num_experts, shared_size = config.num_experts, config.shared_size
        self.gate = Linear(whole(hidden_size), {"gate": whole(num_experts)}, format)
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.router_bias:
            bias = torch.empty(num_experts, dtype=torch.float32)
            self.e_score_correction_bias = parameter(bias)
        self._joins = shared_size == config.size and not by_rank and format.scheme is None
        self.experts = FusedExperts(
            num_experts,
            hidden_size,
            config.size,
            format.within("experts"),
            comm,
            by_rank=by_rank,
            num_more=int(self._joins),
        )
        self.shared_experts: GatedMLP | None = None
        if shared_size:
            shared = format.within("shared_experts")
            self.shared_experts = GatedMLP(hidden_size, shared_size, shared, comm, bias=False)
            if self._joins:
                [gate_up], [down] = map(self.experts.more, ("gate_up_proj", "down_proj"))
                self.shared_experts.gate_up_proj.replace_product(DenseProduct(gate_up))
                self.shared_experts.down_proj.replace_product(DenseProduct(down))
        self._routing, self._comm = config.routing, comm

    def forward(self, residual: Residual, norm: RMSNorm, rows: Rows) -> Residual:
        hidden, logits, stream = self.gate.product.of_kept_norm(residual, norm, rows)
        joins = self._joins and joins_shared(len(hidden), hidden.device)
        joins = joins and rows.adapted is None  # the MLP may have adapters, which are not stacked
        routing = self._routing._replace(num_shared=int(joins))
        choice = ByScores(logits, routing, self.e_score_correction_bias)
        if joins or self.shared_experts is None:
            return self.experts.add_to(hidden, choice, stream, rows)
        if self._comm.size > 1:
            summand = self.shared_experts.summand(hidden, rows)
            summand += self.experts.summand(hidden, choice, rows)
            return Residual(stream, pending=partial(self._comm.all_reduce_norm, summand))
        added = self.shared_experts.add_to(hidden, stream, rows)
        if added.delta is None:  # where a GEMM adds its result to the stream
            return self.experts.add_to(hidden, choice, added.rows, rows)
        added.delta.add_(self.experts.summand(hidden, choice, rows))
        return added
