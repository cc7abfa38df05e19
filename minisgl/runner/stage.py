"""A rank's exchange with the other stages of its pipeline, step by step.

    first    ─[tokens of N - lag]─[rows of N]─┐send
    last     ─────────────────────────────────┴─[rows of N]─[tokens of N]─┐send to the first

Tokens return as a whole table, the last token of every slot: that is a kilobyte, and it does not
matter which of them a step has sampled. If steps sample runs, the table has the lengths and the
drafts of the slots, too, and a stage in the middle gets it from the stage before. Values of slots
that are in a later step are old, until the tokens of that step return.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from minisgl.distributed.communicator import SINGLE_RANK
from minisgl.distributed.pipeline import OneStage, Pipeline
from minisgl.models.decoder import Taps
from minisgl.scheduler.plan import StepPlan


class Stage:
    """The stage of a rank. Its methods are called in launch order, on the compute lane."""

    def __init__(
        self,
        pipeline: Pipeline,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_runs: bool = False,
    ) -> None:
        """hidden_size, dtype: of the rows that pass between stages. has_runs: whether steps sample
        runs."""
        self.pipeline = pipeline
        self._has_runs = has_runs
        self.is_first = pipeline.stage == 0
        self.is_last = pipeline.stage == pipeline.size - 1
        # Of captured steps: the rows that they read and those that they write.
        self.inbox = self.outbox = torch.empty((0, hidden_size), dtype=dtype, device=device)
        self._unreturned: deque[int] = deque()  # on the first stage: steps that have sampled

    def bytes_on_the_way(self, num_rows: int) -> int:
        """Memory of the rows that are being sent, if steps have `num_rows` of them."""
        row_bytes = self.inbox.shape[1] * self.inbox.itemsize
        return 0 if self.is_last else self.pipeline.num_in_flight * num_rows * row_bytes

    def taps(self, layers: tuple[int, ...], num_rows: int) -> Taps | None:
        """Room for the residual stream of these layers; None if there are none."""
        if not layers:
            return None
        return Taps(layers, self.inbox.new_empty((num_rows, len(layers) * self.inbox.shape[1])))

    def make_boxes(self, num_rows: int) -> None:
        """Make room for captured steps of up to `num_rows` rows."""
        if self.pipeline.size > 1 and len(self.inbox) < num_rows:
            self.inbox = self.inbox.new_empty((num_rows, self.inbox.shape[1]))
            self.outbox = torch.empty_like(self.inbox)

    def boxed_rows(self, num_rows: int) -> Tensor | None:
        """The rows of the inbox that a captured step reads; None on the first stage."""
        return None if self.is_first else self.inbox[:num_rows]

    def begin(self, plan: StepPlan, table: Tensor) -> None:
        """Wait on the first stage for the tokens that the plan needs, in `table`, which is
        SlotTables.returned; pass it on to stages in the middle if these need it."""
        self._wait_for_tokens(plan.step - plan.lag, table)
        if self._has_runs and plan.decode_slots:
            if not (self.is_first or self.is_last):
                self.pipeline.receive(table)
            if self.pipeline.stage < self.pipeline.size - 2:
                self.pipeline.send(table.clone())

    def receive(self, plan: StepPlan, num_rows: int, *, captured: bool) -> Tensor | None:
        """The rows that the stage before has computed: [num_rows, hidden_size], in the inbox if the
        step is captured. None on the first stage, and if the plan has no rows. What follows is the
        step's work."""
        if not plan.num_tokens:
            return None
        rows = self.boxed_rows(num_rows)
        if rows is not None:
            if not captured:
                rows = self.inbox.new_empty((num_rows, self.inbox.shape[1]))
            self.pipeline.receive(rows)
        return rows

    def send(self, plan: StepPlan, rows: Tensor) -> None:
        """Send the rows of a step, whose work is done, to the next stage."""
        self.pipeline.send(rows)
        if plan.num_samples and not plan.deferred:
            self.will_return(plan.step)

    def will_return(self, step: int) -> None:
        """Note on the first stage that the tokens of `step` will return."""
        if self.is_first:
            self._unreturned.append(step)

    def return_tokens(self, plan: StepPlan, table: Tensor) -> None:
        """Send the tokens to the first stage, unless this is the first or the plan samples none.
        The step's work is done."""
        if not self.is_first and plan.num_samples:
            self.pipeline.send_tokens(table.clone())

    def drain(self, table: Tensor) -> None:
        """Wait on the first stage for all tokens, so that the last one does not wait for ever."""
        while self._unreturned:
            self._wait_for_tokens(self._unreturned[0], table)

    def _wait_for_tokens(self, step: int, table: Tensor) -> None:
        while self._unreturned and self._unreturned[0] <= step:
            self.pipeline.receive_tokens(table)
            self._unreturned.popleft()


def whole_model() -> Stage:
    """The only stage, of a single rank."""
    return Stage(OneStage(SINGLE_RANK), 0, torch.float32, torch.device("cpu"))
