"""The host halves of all parts."""

from __future__ import annotations

from minisgl.kvcache.tiers import Tiers
from minisgl.parts.copies.host import CopyPlan, PageCopies
from minisgl.parts.masks.host import MaskPlan, Masks
from minisgl.parts.scores.host import ScorePlan, Scores
from minisgl.parts.vectors.host import VectorPlan, Vectors
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.text.tokenizer import Tokenizer

PLANS: tuple[type[PartPlan], ...] = (MaskPlan, ScorePlan, VectorPlan, CopyPlan)


def host_parts(
    tiers: Tiers | None,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    task: str = "generate",
) -> list[Part]:
    """In the order in which they plan. tiers: behind the device, if there are any. task: for which
    the model was loaded."""
    parts: list[Part] = [Masks(tokenizer, vocab_size), Scores(), Vectors(task)]
    return parts if tiers is None else [*parts, PageCopies(tiers)]
