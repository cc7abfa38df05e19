"""What the runner asks of a part: the device half of a feature that takes part in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from minisgl.matcher import MaskRows
from minisgl.request import TokenLogprobs
from minisgl.scheduler.plan import PartPlan


class StepPart:
    """What one step does for a part, on one rank; each hook does nothing unless the part has
    something to do.

    The first five are called on the compute lane, `change_sampling` after `end` if the sampling
    follows later (`StepPlan.deferred`); the others block until the device is done, on threads of
    their own.
    """

    def begin(self) -> None:
        """Queue what comes before the rows of the step, which may have none."""

    def read_rows(self, hidden: Tensor, first_rows: Sequence[int]) -> None:
        """Queue what is computed of the hidden states of all rows: on the last stage, of a step in
        which the plan of some part says `reads_rows`. first_rows: of each chunk."""

    def read_logits(self, logits: Tensor, rows: Sequence[range]) -> None:
        """Queue what is computed of the logits that are sampled: in such a step, if it samples.
        logits: raw, of this rank. rows: of each request that is sampled, in the plan's order."""

    def change_sampling(self, masks: MaskRows) -> None:
        """Queue what must be there before the step samples, where it has masks. masks: of
        `Runner.new_masks`, filled."""

    def end(self) -> None:
        """Queue what follows the step."""

    def follow(self) -> Iterator[int]:
        """Wait for each thing that goes on after the step, and yield its id."""
        return iter(())

    def add_logprobs(
        self, logprobs: dict[int, TokenLogprobs], run_lengths: Sequence[int] | None
    ) -> None:
        """Add to the logprobs of tokens, as StepResult has both."""

    def outcome(self) -> object:
        """What the host half settles, once the step is done."""


# The device half of each part, by the class of its plans: makes what a step does of its plan.
DeviceParts = Mapping[type[PartPlan], Callable[[Any], StepPart]]
