"""Where the ranks of an engine run: in which stage, group and node each is.

Ranks are numbered stage by stage, and nodes take consecutive ranks in equal shares. So the ranks of
a tensor-parallel group, which exchange the most, are neighbours. With tp 4, pp 2 and 2 nodes:

    stage       0  0  0  0   1  1  1  1
    rank        0  1  2  3   4  5  6  7
    node        0  0  0  0   1  1  1  1
    local rank  0  1  2  3   0  1  2  3
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The ranks of all nodes."""

    tp: int  # ranks of a tensor-parallel group, which share each layer
    pp: int = 1  # pipeline stages, each a tensor-parallel group
    num_nodes: int = 1

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
        return stage * self.tp + tp_rank

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        """The place of a rank in its tensor-parallel group."""
        return rank % self.tp

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """The place of a rank among those of its node; also its GPU there."""
        return rank % self.ranks_per_node

    def first_rank(self, node: int) -> int:
        """The lowest rank of a node."""
        return node * self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        first = self.first_rank(node)
        return range(first, first + self.ranks_per_node)

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of a tensor-parallel group."""
        return range(stage * self.tp, (stage + 1) * self.tp)

    def spans_nodes(self, stage: int) -> bool:
        """True if ranks of this tensor-parallel group run on different nodes."""
        ranks = self.ranks_of_stage(stage)
        return self.node(ranks[0]) != self.node(ranks[-1])
