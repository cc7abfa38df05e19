"""What a step says of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.kernels.adapters import AdaptedRows


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step, on the device. Layers hand them to their products, so that what multiplies a
    row may depend on the request that it is of."""

    slots: Tensor  # [num_rows] int64: of the row's request; of padding the scratch slot
    positions: Tensor  # [num_rows] int64: of the row's token among those of its request
    rope: Tensor  # [num_rows] int64: by which it is rotated; the same object unless they differ
    adapted: AdaptedRows | None = None  # by their adapters; None: none has one

    @staticmethod
    def of(slots: Tensor, positions: Tensor, adapted: AdaptedRows | None = None) -> Rows:
        """Rows that are rotated by their positions."""
        return Rows(slots, positions, positions, adapted)

    def part(self, rows: slice, adapted: AdaptedRows | None = None) -> Rows:
        """A view of some of them. adapted: these, by their adapters."""
        assert (adapted is None) == (self.adapted is None)
        positions = self.positions[rows]
        rope = positions if self.rope is self.positions else self.rope[..., rows]
        return Rows(self.slots[rows], positions, rope, adapted)
