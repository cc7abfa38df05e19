"""Which of a prompt's rows make a vector."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PooledRows(enum.StrEnum):
    """Which tokens of a prompt a vector is made of."""

    LAST = "last"
    FIRST = "first"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is computed of a prompt instead of the tokens that follow it: one vector."""

    rows: PooledRows
    num_skipped: int = 0  # first tokens that a mean leaves out
    token_ids: tuple[int, ...] = ()  # their logits make the vector; none: the hidden state does

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows of cached tokens, which no step computes again, would be missing."""
        return self.rows is not PooledRows.LAST
