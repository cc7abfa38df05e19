"""Results of blocks that are normed before the residual stream gets them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.reference import PostNorm


@dataclass(frozen=True, slots=True)
class PostNormed:
    """The result of a block, which the next norm of the stream norms and adds first: a PendingNorm.

    summands: as of dispatch.add_post_norm; of all ranks together.
    """

    summands: tuple[Tensor, ...]
    post: PostNorm

    def __call__(self, rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        [normed], rows = self.norms(rows, (weight,))
        return normed, rows

    def norms(self, rows: Tensor, weights: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """(several norms of the stream, which have one eps with those of the result; the stream as
        one tensor)."""
        return dispatch.add_post_norm(self.summands, rows, self.post, weights)
