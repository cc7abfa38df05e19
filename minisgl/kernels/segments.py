"""Which rows of a step advance which states of requests."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Segments(NamedTuple):
    """Rows of several requests, one segment after the other, and the slots of their states.

    The state of a segment starts as that of its source, advances by its rows, and is left in its
    slot, also if it has no rows. A segment whose source is the slot of the segment before it
    continues that one. So a snapshot of a state is a segment that leaves it in another slot, from
    which the next one goes on; and a request that starts from a snapshot has that as its source.

    A slot that is written must not belong to segments that do not continue one another, nor may
    these read it; only what the scratch slot holds does not matter. Rows after the last segment
    are padding, whose results are undefined; so are segments without rows from the scratch slot
    to the scratch slot.
    """

    sources: Tensor  # [num_segments] int64
    slots: Tensor  # [num_segments] int64
    row_starts: Tensor  # [num_segments + 1] int32: first row of each, then the end of the last


class Runs(NamedTuple):
    """Decode rows of several requests, `size` rows of each, one run after the other.

    Which of the rows of a run count is known in the next step. So the state of a slot lacks the
    rows of its last run, which are kept beside it. A run of one row counts, and is not kept.
    """

    slots: Tensor  # [num_runs] int64; only the scratch slot may occur more than once
    # [num_runs] int32: kept rows that count, by which the state advances first. None: runs are one
    # row, of which none is kept.
    num_kept: Tensor | None = None
    size: int = 1
