"""A mixture of experts in the place of a layer's MLP (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from minisgl.distributed.communicator import Communicator
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.moe import select_experts
from minisgl.kernels.moe.grouped import GroupRouting
from minisgl.kernels.moe.reference import (
    ByRouter,
    Choice,
    Clamped,
    Routing,
)
from minisgl.kernels.residual import Residual
from minisgl.kernels.rows import Rows
from minisgl.layers.formats import HeldExperts, WeightFormat
from minisgl.layers.linear import Linear, parameter
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.shards import block_shard, even_shard, uneven_shard, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that replaces the MLP in some layers."""

    num_experts: int
    num_chosen: int  # top_k: experts per token
    size: int  # inner dimension of one expert's MLP
    normalize: bool  # whether the weights of a token's experts are scaled to add up to 1
    layers: frozenset[int]  # indices of the layers with experts
    # How they follow from the router's logits, if not by a softmax of those that are chosen.
    routing: GroupRouting | None = None
    router: str = "gate"  # its name in a checkpoint
    router_bias: bool = False  # of each expert, which counts in that choice alone
    shared_size: int = 0  # inner dimension of an expert that every token takes; 0: there is none
    bias: bool = False  # of the router's map and of the experts'
    clamped: Clamped | None = None  # their activation, if it is not silu(gate) · up
    interleaved: bool = False  # a checkpoint has them stacked, gates and ups in turn

    @property
    def inner_block(self) -> int:
        """A rank's part of `size` is whole blocks of so many."""
        return CHUNK if self.interleaved else 1


class FusedExperts(nn.Module):
    """The gated MLPs of the experts, stacked. A rank computes a summand of the sum over a row's
    experts.

    It holds a part of the inner dimension of each expert, `inner`; biases of the results are then
    part of rank 0's, and the other ranks' are zero. Or, `by_rank`, it holds whole experts, `own`,
    and drops the pairs of a row and an expert that another rank has.

    `interleaved`: a checkpoint has them stacked, gates and ups in turn, like gpt-oss
    (models/interleaved_experts.py). Parts of the inner dimension are then whole chunks, so that
    they can be quantised, and padded with zeros.

    `num_more`: experts behind those held, whose weights are filled elsewhere (`more`).
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        format: WeightFormat,
        comm: Communicator,
        *,
        bias: bool = False,
        clamped: Clamped | None = None,
        gelu: bool = False,
        interleaved: bool = False,
        by_rank: bool = False,
        num_more: int = 0,
    ) -> None:
        super().__init__()
        rank, size = (0, 1) if by_rank else (comm.rank, comm.size)  # of the inner dimension
        self.inner = even_shard(expert_size, rank, size)
        if interleaved:
            self.inner = block_shard(expert_size, CHUNK, rank, size)
        self.hidden = whole(hidden_size)
        self.own = whole(num_experts)
        if by_rank:
            self.own = uneven_shard(num_experts, comm.rank, comm.size)
        self.interleaved = interleaved
        self.holds_bias = rank == 0
        self.product = format.experts(
            HeldExperts(
                whole=num_experts,
                number=self.own.size + num_more,
                hidden_size=hidden_size,
                inner=self.inner,
                bias=bias,
                clamped=clamped,
                gelu=gelu,
            )
        )
        for name, weight in self.product.weights.items():
            part = weight[: self.own.size] if num_more else weight
            self.register_parameter(name, parameter(part))
        self._comm = comm
        # [rows, top_k] int16: where the experts of the rows of a step are noted; None: nowhere.
        self.noted: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Those of all ranks."""
        return self.own.whole

    @property
    def held(self) -> range:
        """Those of this rank, by their numbers."""
        return range(self.own.first, self.own.first + self.own.size)

    def more(self, name: str) -> Tensor:
        """The part of a stack of weights that is of the experts behind those held."""
        return self.product.weights[name][self.own.size :]

    def summand(self, x: Tensor, choice: Choice, rows: Rows | None) -> Tensor:
        """This rank's summand of the weighted sum over each row's chosen experts. x: [num_rows,
        hidden_size]; returns a new tensor like x."""
        choice = self._with_note(choice)
        if self.own.size < self.num_experts:
            choice = select_experts.choose_of(choice, self.own)
        return select_experts.weighted_sum(self.product, x, choice, rows)

    def summed(self, x: Tensor, choice: Choice, rows: Rows | None) -> Tensor:
        """The weighted sum over each row's chosen experts: a new tensor like x."""
        summand = self.summand(x, choice, rows)
        return summand if self._comm.size == 1 else self._comm.all_reduce(summand)

    def add_to(self, x: Tensor, choice: Choice, stream: Tensor, rows: Rows | None) -> Residual:
        """The stream with the weighted sum over each row's chosen experts added. May overwrite it.

        x and stream: [num_rows, hidden_size].
        """
        if self._comm.size == 1:
            choice = self._with_note(choice)
            return select_experts.add_weighted_sum(self.product, x, choice, stream, rows)
        summand = self.summand(x, choice, rows)
        return Residual(stream, pending=partial(self._comm.all_reduce_norm, summand))

    def _with_note(self, choice: Choice) -> Choice:
        """The same choice, which is made and noted now where something asks for that. An expert
        that all rows take comes last, and is not noted."""
        if self.noted is None:
            return choice
        chosen = select_experts.choose(choice)
        experts = chosen.experts[:, : self.noted.shape[1]]
        self.noted[: len(experts)].copy_(experts)
        return chosen


class SparseMoeBlock(nn.Module):
    """A router chooses experts for each row; their weighted sum is added to the stream. `by_rank`:
    a rank has whole experts, and not a part of each."""

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
        router = {config.router: whole(config.num_experts)}
        self.gate = Linear(whole(hidden_size), router, format, bias=config.bias)
        self.experts = FusedExperts(
            config.num_experts,
            hidden_size,
            config.size,
            format.within("experts"),
            comm,
            bias=config.bias,
            clamped=config.clamped,
            interleaved=config.interleaved,
            by_rank=by_rank,
        )
        self._routing = Routing(config.num_chosen, config.normalize)

    def forward(self, residual: Residual, norm: RMSNorm, rows: Rows) -> Residual:
        hidden, logits, stream = self.gate.product.of_kept_norm(residual, norm, rows)
        return self.experts.add_to(hidden, ByRouter(logits, self._routing), stream, rows)


class SharedExpertMoeBlock(SparseMoeBlock):
    """A mixture of experts beside one that every row takes: sigmoid(shared_expert_gate(x)) times
    its result is added to theirs."""

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        format: WeightFormat,
        comm: Communicator,
        *,
        by_rank: bool = False,
    ) -> None:
        super().__init__(hidden_size, config, format, comm, by_rank=by_rank)
        shared = format.within("shared_expert")
        self.shared_expert = GatedMLP(hidden_size, config.shared_size, shared, comm, bias=False)
        gate = {"shared_expert_gate": whole(1)}
        self.shared_expert_gate = Linear(whole(hidden_size), gate, format)
        self._comm = comm

    def forward(self, residual: Residual, norm: RMSNorm, rows: Rows) -> Residual:
        hidden, logits, stream = self.gate.product.of_kept_norm(residual, norm, rows)
        share = self.shared_expert_gate.product(hidden, rows).sigmoid()
        summand = self.shared_expert.summand(hidden, rows).mul_(share)
        summand += self.experts.summand(hidden, ByRouter(logits, self._routing), rows)
        if self._comm.size == 1:
            return Residual(stream, delta=summand)
        return Residual(stream, pending=partial(self._comm.all_reduce_norm, summand))
