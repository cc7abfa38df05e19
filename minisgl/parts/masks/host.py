"""The scheduler's half: which rows of a step need a mask, and whether it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.request import Request
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import Running, StepWork


@dataclass(frozen=True, slots=True)
class MaskPlan(PartPlan):
    changes_sampling: ClassVar[bool] = True
    is_quick: ClassVar[bool] = True

    slots: tuple[int, ...]  # of the sampled rows that need a mask, in the order of the rows


class Masks(Part):
    def concerns(self, request: Request) -> bool:
        return request.matcher is not None

    def plan(self, work: StepWork) -> MaskPlan | None:
        masked = masked_rows(work)
        if not masked:
            return None
        if any(map(_is_blind, masked)):
            work.deferred = True
        return MaskPlan(tuple([running.slot for running in masked]))


def masked_rows(work: StepWork) -> list[Running]:
    """The requests of the rows that need masks, in their order. Some may have ended, or been
    retracted: the sampled token of a retracted one is settled."""
    return [running for running in work.sampled if running.request.matcher is not None]


def _is_blind(running: Running) -> bool:
    """Whether the mask of a sampled row depends on a token that is not settled. That of a chunk
    does not, because its tokens are known."""
    return len(running.request.token_ids) < running.num_scheduled
