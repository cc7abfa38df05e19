"""The host halves of all parts."""

from __future__ import annotations

from minisgl.kvcache.tiers import Tiers
from minisgl.parts.copies.host import CopyPlan, PageCopies
from minisgl.parts.masks.host import MaskPlan, Masks
from minisgl.parts.scores.host import ScorePlan, Scores
from minisgl.parts.vectors.host import VectorPlan, Vectors
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan

PLANS: tuple[type[PartPlan], ...] = (MaskPlan, ScorePlan, VectorPlan, CopyPlan)


def host_parts(tiers: Tiers | None) -> list[Part]:
    """In the order in which they plan. tiers: behind the device, if there are any."""
    parts: list[Part] = [Masks(), Scores(), Vectors()]
    return parts if tiers is None else [*parts, PageCopies(tiers)]
