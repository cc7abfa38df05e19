"""The scheduler's half: the copies between the tiers that go with a step."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.kvcache.copies import Copies
from minisgl.kvcache.tiers import Tiers
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class CopyPlan(PartPlan):
    copies: Copies


class PageCopies(Part):
    is_always = True

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @property
    def wants_step(self) -> bool:
        return self._tiers.transits.is_copying_out

    def plan(self, work: StepWork) -> CopyPlan | None:
        copies = self._tiers.take_copies(work.step)
        return None if copies is None else CopyPlan(copies)
