"""Where the ranks of an engine run: in which stage, group and node each is.

Stages are numbered in the order of the model's layers, and ranks stage by stage, from the last
stage on: this samples, and rank 0, in whose process the scheduler is, so has the tokens. Nodes take
consecutive ranks in equal shares. So the ranks of a tensor-parallel group, which exchange the most,
are neighbours. With tp 4, pp 2 and 2 nodes:

    rank        0  1  2  3   4  5  6  7
    stage       1  1  1  1   0  0  0  0
    node        0  0  0  0   1  1  1  1
    local rank  0  1  2  3   0  1  2  3
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.config import ResolvedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The ranks of all nodes."""

    tp: int  # ranks of a tensor-parallel group, which share each layer
    pp: int = 1  # pipeline stages, each a tensor-parallel group
    num_nodes: int = 1

    @classmethod
    def of(cls, config: ResolvedConfig) -> RankLayout:
        """The ranks that the options ask for."""
        return cls(tp=config.tp, pp=config.pp, num_nodes=config.nnodes)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers below 1, and if the nodes cannot have equal shares."""
        if min(self.tp, self.pp, self.num_nodes) < 1:
            raise ValueError(f"{self}: allowed: 1 or more of each")
        if self.world_size % self.num_nodes:
            raise ValueError(f"{self}: {self.num_nodes} nodes cannot share the ranks evenly")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.num_nodes

    def rank(self, stage: int, tp_rank: int) -> int:
        return self.ranks_of_stage(stage)[tp_rank]

    def stage(self, rank: int) -> int:
        return (rank // self.tp - 1) % self.pp

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """The place of a rank among those of its node; also its GPU there."""
        return rank % self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        first = node * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of a tensor-parallel group."""
        first = (stage + 1) % self.pp * self.tp
        return range(first, first + self.tp)

    def spans_nodes(self, stage: int) -> bool:
        """True if ranks of this tensor-parallel group run on different nodes."""
        ranks = self.ranks_of_stage(stage)
        return self.node(ranks[0]) != self.node(ranks[-1])
