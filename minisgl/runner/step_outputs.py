"""Copies sampled tokens and logprobs from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.kernels.sampling.reference import TokenScores
from minisgl.kernels.slots.slot_state import OutputRing, SlotState
from minisgl.kernels.slots.slot_updates import feed_slots, settle_runs
from minisgl.request import DEFAULT_LOGPROBS
from minisgl.runner.sampled_rows import SampledRows, SampleRows

# Must exceed the number of steps queued and not yet collected.
RING_SIZE = 8


class StepOutputs:
    """A ring in pinned host memory: each step writes one entry, read once the step is done.

    An entry has room for the outputs of `num_rows` batch rows. The device keeps the index of the
    next entry, because every replay of a captured step is identical; the host counts as well.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        ring_size: int = RING_SIZE,
        num_top: int = DEFAULT_LOGPROBS,
    ) -> None:
        """num_top: the most top logprobs of a token."""
        self._size = ring_size
        self._ring = OutputRing.allocate(ring_size, num_rows, num_top, device)
        self._token_ids = self._ring.token_ids.numpy()
        self._entry = 0
        self._next_entry = 0

    def open(self) -> int:
        """Reserve the ring entry of the next step, and return its index."""
        self._entry, self._next_entry = self._next_entry, (self._next_entry + 1) % self._size
        return self._entry

    def send(self, samples: SampleRows, sampled: SampledRows, state: SlotState) -> None:
        """Queue the end of a step: write its tokens into the slot tables and the ring."""
        slots, token_ids, shape = samples.slots, sampled.token_ids, samples.shape
        feed_slots(slots, token_ids, sampled.scores, state, self._ring, self._entry)
        if shape.run > 1:
            of_runs = shape.num_decodes, shape.run
            slots, token_ids = (
                each[: shape.num_decode_rows].view(of_runs) for each in (slots, token_ids)
            )
            settle_runs(slots, token_ids, state, self._ring, self._entry)

    def recount(self) -> None:
        """Reset the device's index after a failed step, which may have advanced it. Runs on the
        compute lane."""
        self._ring.next_entry.fill_(self._next_entry)

    def token_ids(self, entry: int, part: range) -> list[int]:
        """The tokens of batch rows `part` in ring entry `entry`; the step must be done."""
        ids: list[int] = self._token_ids[entry, part.start : part.stop].tolist()
        return ids

    def runs(self, entry: int, runs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of these runs of more than one row, how many tokens count and how many were drafted."""
        counts = self._ring.run_lengths[entry].numpy(), self._ring.num_drafted[entry].numpy()
        lengths, num_drafted = (each[runs].tolist() for each in counts)
        return lengths, num_drafted

    def scores(self, entry: int, part: range) -> TokenScores:
        """The logprobs of the same tokens; undefined if the step computed none."""
        rows = slice(part.start, part.stop)
        ring = self._ring
        return TokenScores(
            logprob=ring.logprob[entry, rows],
            rank=ring.rank[entry, rows],
            top_ids=ring.top_ids[entry, rows],
            top_logprobs=ring.top_logprobs[entry, rows],
        )
