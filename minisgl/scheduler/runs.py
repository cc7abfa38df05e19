"""How many tokens the decode rows of a step may sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SameRuns:
    """Runs of `max_run` tokens where a step has few rows, or else none."""

    max_run: int
    max_rows: int  # of a step that verifies drafts

    def __call__(self, num_samples: int) -> int:
        """max_run of a step that samples for `num_samples` requests."""
        return self.max_run if num_samples * self.max_run <= self.max_rows else 1
