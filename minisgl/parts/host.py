"""The host halves of all parts."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.tiers import Tiers
from minisgl.parts.adapters.host import AdapterPlan, Adapters
from minisgl.parts.copies.host import CopyPlan, PageCopies
from minisgl.parts.experts.host import ExpertPlan, Experts
from minisgl.parts.images.host import Blind, ImagePlan, Images
from minisgl.parts.masks.host import MaskPlan, Masks
from minisgl.parts.named.host import Named, NamedPlan
from minisgl.parts.scores.host import ScorePlan, Scores
from minisgl.parts.vectors.host import VectorPlan, Vectors
from minisgl.parts.weights.host import WeightVersions
from minisgl.request import DEFAULT_LOGPROBS
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import PartPlan
from minisgl.text.tokenizer import Tokenizer

PLANS: tuple[type[PartPlan], ...] = (
    *(MaskPlan, ScorePlan, VectorPlan, CopyPlan, AdapterPlan),
    *(ImagePlan, ExpertPlan, NamedPlan),
)


def host_parts(
    tiers: Sequence[Tiers],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    task: str = "generate",
    max_loras: int = 0,
    image_rows: int = 0,
    turns: bool = False,
    largest_block: int | None = None,
    blind: str = "it reads text only",
    max_logprobs: int = DEFAULT_LOGPROBS,
    logprobs_mode: str = "raw_logprobs",
    routed: tuple[int, int] | None = None,
) -> list[Part]:
    """In the order in which they plan. tiers: behind the device of each rank that has pages of its
    own, if there are any. task: for which the model was loaded. max_loras: adapters on the device
    at once. image_rows: of the buffer for images. turns, largest_block: as of Images. blind: why
    the model takes none, if it does not. max_logprobs: alternatives of a token. logprobs_mode: an
    option. routed: shape of Experts."""
    parts: list[Part] = [Masks(tokenizer, vocab_size), Scores(max_logprobs), Vectors(task)]
    if tiers:
        parts.append(PageCopies(tiers))
    if max_loras:
        parts.append(Adapters(max_loras))
    parts += [WeightVersions(), Experts(routed), Named(vocab_size, max_logprobs, logprobs_mode)]
    if blind:
        parts.append(Blind(blind))
    else:
        parts.append(Images(image_rows, turns=turns, largest_block=largest_block))
    return parts
