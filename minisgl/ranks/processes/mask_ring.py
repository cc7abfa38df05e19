"""Token masks in memory that the ranks of one machine share."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np

from minisgl.matcher import MaskRows, mask_words

# Rank 0 fills the masks of step N once step N - 1 - stages is settled, to whose forward pass every
# rank of its stage has contributed; so all of them are done with the masks of the step before that.
RING_SIZE = 2  # and one for each stage


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of one step."""

    step: int
    rows: MaskRows  # of its masked slots


@dataclass(frozen=True, slots=True)
class MaskRing:
    """The masks of the last steps. Can be pickled only while a process is being spawned."""

    words: Any  # shared uint32 [size, max_rows, words]
    size: int
    max_rows: int
    vocab_size: int

    @staticmethod
    def allocate(
        context: SpawnContext, max_rows: int, vocab_size: int, num_stages: int = 1
    ) -> MaskRing:
        """max_rows: the most masked rows of a step. num_stages: of the pipeline."""
        size = RING_SIZE + num_stages
        words = context.RawArray("I", size * max_rows * mask_words(vocab_size))
        return MaskRing(words, size, max_rows, vocab_size)

    def rows(self, step: int, num_rows: int) -> MaskRows:
        """The masks of a step: written by rank 0, read by all."""
        return self._entry(step)[:num_rows]

    def put(self, masks: StepMasks) -> None:
        """Write masks that were filled on another machine. Raises ValueError if they do not fit."""
        self._entry(masks.step)[: len(masks.rows)] = masks.rows

    def _entry(self, step: int) -> MaskRows:
        table = np.frombuffer(self.words, dtype=np.uint32)
        entries = table.reshape(self.size, self.max_rows, mask_words(self.vocab_size))
        entry: MaskRows = entries[step % self.size]
        return entry
