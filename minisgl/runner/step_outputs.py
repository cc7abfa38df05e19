"""Copies sampled tokens and logprobs from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.dispatch import feed_slots
from minisgl.kernels.slots.state import OutputRing, SlotState
from minisgl.request import MAX_LOGPROBS

# Must exceed the number of steps that are queued and not yet collected.
RING_SIZE = 8


class StepOutputs:
    """A ring in host memory: each step writes one row, and the host reads it once the step is done.

    Each ring row has room for the outputs of `num_rows` batch rows. The device keeps the index of
    the next ring row, because a captured step is the same at every replay; the host counts too.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._ring = OutputRing.allocate(RING_SIZE, num_rows, MAX_LOGPROBS, device)
        self._token_ids = self._ring.token_ids.numpy()
        self._row = 0
        self._next_row = 0

    def open(self) -> int:
        """Return the ring row of the step that is queued next."""
        self._row, self._next_row = self._next_row, (self._next_row + 1) % RING_SIZE
        return self._row

    def send(
        self, slots: Tensor, token_ids: Tensor, scores: TokenScores | None, state: SlotState
    ) -> None:
        """Queue the end of a step: write its tokens into the slot tables and the ring."""
        feed_slots(slots, token_ids, scores, state, self._ring, self._row)

    def recount(self) -> None:
        """Reset the device's index after a step that may or may not have advanced it. Runs on the
        compute lane."""
        self._ring.next_row.fill_(self._next_row)

    def token_ids(self, row: int, part: range) -> list[int]:
        """The tokens in ring row `row` of the batch rows `part`; the step must be done."""
        ids: list[int] = self._token_ids[row, part.start : part.stop].tolist()
        return ids

    def scores(self, row: int, part: range) -> TokenScores:
        """The logprobs of the same tokens; undefined if the step computed none."""
        rows = slice(part.start, part.stop)
        ring = self._ring
        return TokenScores(
            logprob=ring.logprob[row, rows],
            top_ids=ring.top_ids[row, rows],
            top_logprobs=ring.top_logprobs[row, rows],
        )
