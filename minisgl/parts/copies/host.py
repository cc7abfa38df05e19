"""The scheduler's half: the copies between the tiers that go with a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.kvcache.copies import Copies
from minisgl.kvcache.tiers import Tiers
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class CopyPlan(PartPlan):
    of_ranks: tuple[Copies, ...]  # that divide the requests; otherwise those of all ranks, once


class PageCopies(Part):
    is_always = True

    def __init__(self, tiers: Sequence[Tiers]) -> None:
        """tiers: behind the device of each rank that has pages of its own."""
        self._tiers = tiers

    @property
    def wants_step(self) -> bool:
        return any(each.transits.is_copying_out for each in self._tiers)

    def plan(self, work: StepWork) -> CopyPlan | None:
        taken = [each.take_copies(work.step) for each in self._tiers]
        return CopyPlan(tuple(each or Copies() for each in taken)) if any(taken) else None
