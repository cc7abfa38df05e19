"""A rank of several, without the others."""

from __future__ import annotations

from minisgl.distributed.communicator import SingleRank


class Rank(SingleRank):
    """One of several, whose others are never asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank  # type: ignore[misc]
        self.size = size  # type: ignore[misc]
