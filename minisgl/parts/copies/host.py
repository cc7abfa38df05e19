"""The scheduler's half: the copies between the tiers that go with a step."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.kvcache.copies import Copies
from minisgl.kvcache.manager import KVCacheManager
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class CopyPlan(PartPlan):
    copies: Copies


class PageCopies(Part):
    always = True

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def plan(self, work: StepWork) -> CopyPlan | None:
        copies = self._kv.take_copies(work.step)
        return None if copies is None else CopyPlan(copies)
