"""The runner's half: logprobs of named tokens, from the logits that are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from minisgl.device.lanes import HostCopy, Lanes
from minisgl.parts.device_part import StepPart
from minisgl.parts.named.host import NamedPlan
from minisgl.request import TokenLogprobs

# Rows that are scored together. Few, since no memory is kept for their float32 logits.
BLOCK_ROWS = 16


class NamedStep(StepPart):
    def __init__(
        self, lanes: Lanes, gathered: Callable[[Tensor], Tensor], num_rows: int, plan: NamedPlan
    ) -> None:
        """gathered: rows of logits over the whole vocabulary, by this rank's part of them.
        num_rows: that are scored together."""
        self._lanes = lanes
        self._gathered = gathered
        self._block = num_rows
        self._asked = plan.asked
        self._copy: HostCopy | None = None
        self._num_rows: list[int] = []  # of each that asks

    def read_logits(self, logits: Tensor, rows: Sequence[range]) -> None:
        """Score every row of a run: only the device knows how many of them count."""
        width = max(len(ids) for _, ids in self._asked)
        own = [rows[place] for place, _ in self._asked]
        self._num_rows = [*map(len, own)]
        table: list[int] = []
        for num_rows, (_, ids) in zip(self._num_rows, self._asked, strict=True):
            table += [*ids, *[0] * (width - len(ids))] * num_rows
        places, token_ids = self._lanes.upload([[*chain.from_iterable(own)], table])
        ids_of_rows = token_ids.view(-1, width)
        scores = [
            self._gathered(logits[some]).float().log_softmax(dim=-1).gather(1, ids)
            for some, ids in zip(
                places.split(self._block), ids_of_rows.split(self._block), strict=True
            )
        ]
        self._copy = self._lanes.download([torch.cat(scores)])

    def add_logprobs(
        self, logprobs: dict[int, TokenLogprobs], run_lengths: Sequence[int] | None
    ) -> None:
        if self._copy is None:  # the logits are on another stage
            return
        (scores,) = self._copy.wait()
        first = 0
        for num_rows, (place, ids) in zip(self._num_rows, self._asked, strict=True):
            token = place if run_lengths is None else sum(run_lengths[:place])
            num_tokens = 1 if run_lengths is None else run_lengths[place]
            for row in scores[first : first + num_tokens].tolist():
                named = tuple(zip(ids, row, strict=False))
                logprobs[token] = replace(logprobs[token], named=named)
                token += 1
            first += num_rows
