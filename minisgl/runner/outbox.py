"""The way of sampled tokens from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.dispatch import feed_slots
from minisgl.kernels.slots.state import OutputRing, SlotState
from minisgl.request import MAX_LOGPROBS

# More than steps may be queued and not yet collected.
RING_SIZE = 8


class Outbox:
    """A ring of rows in host memory. Each step writes one; the host reads it once the step is done.

    The device knows the next row itself, since a captured step is the same at each replay; the host
    counts along.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._ring = OutputRing.allocate(RING_SIZE, num_rows, MAX_LOGPROBS, device)
        self._token_ids = self._ring.token_ids.numpy()
        self._row = 0
        self._next_row = 0

    def open(self) -> int:
        """The row of the step that is queued next."""
        self._row, self._next_row = self._next_row, (self._next_row + 1) % RING_SIZE
        return self._row

    def send(
        self, slots: Tensor, token_ids: Tensor, scores: TokenScores | None, state: SlotState
    ) -> None:
        """Queue the end of a step: its tokens, into the tables and to the host."""
        feed_slots(slots, token_ids, scores, state, self._ring, self._row)

    def recount(self) -> None:
        """After a step of which it is unknown how far it got. Runs on the compute lane."""
        self._ring.next_row.fill_(self._next_row)

    def token_ids(self, row: int, part: range) -> list[int]:
        """What the step that `row` was opened for has sampled, once it is done."""
        ids: list[int] = self._token_ids[row, part.start : part.stop].tolist()
        return ids

    def scores(self, row: int, part: range) -> TokenScores:
        """The same of its scores, if it had any."""
        rows = slice(part.start, part.stop)
        ring = self._ring
        return TokenScores(
            logprob=ring.logprob[row, rows],
            top_ids=ring.top_ids[row, rows],
            top_logprobs=ring.top_logprobs[row, rows],
        )
