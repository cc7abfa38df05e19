"""The device halves of all parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from minisgl.device.lanes import Lanes
from minisgl.parts.adapters.device import AdapterStep, DeviceAdapters
from minisgl.parts.adapters.host import AdapterPlan
from minisgl.parts.copies.device import CopyStep
from minisgl.parts.copies.host import CopyPlan
from minisgl.parts.device_part import DeviceParts, StepPart
from minisgl.parts.experts.device import ExpertStep
from minisgl.parts.experts.host import ExpertPlan
from minisgl.parts.images.device import DeviceImages, ImageStep
from minisgl.parts.images.host import ImagePlan
from minisgl.parts.masks.device import MaskStep
from minisgl.parts.masks.host import MaskPlan
from minisgl.parts.named.device import BLOCK_ROWS, NamedStep
from minisgl.parts.named.host import NamedPlan
from minisgl.parts.scores.device import ScoreStep, rows_scored
from minisgl.parts.scores.host import ScorePlan
from minisgl.parts.vectors.device import VectorStep
from minisgl.parts.vectors.host import VectorPlan
from minisgl.scheduler.plan import PartPlan
from minisgl.tiers.host.host_copies import HostCopies


def device_parts(
    lanes: Lanes,
    vocab_size: int,
    whole_logits: Callable[[Tensor], Tensor],
    gathered: Callable[[Tensor], Tensor],
    mask: Callable[[tuple[int, ...], Tensor], None],
    copies: HostCopies | None,
    rank: int,
    rank_of: Callable[[int], int],
    adapters: DeviceAdapters | None,
    images: DeviceImages | None,
    experts: Tensor | None,
    *,
    row_by_row: bool = False,
) -> DeviceParts:
    """whole_logits: of rows of hidden states, over the whole vocabulary. gathered: the same of this
    rank's part of the logits. mask: of the sampler. copies: None without a host cache. rank: this
    one, of those that divide the requests. rank_of: which of them has the one in a slot. adapters:
    None without any. images: None for a model that takes none. experts: of note_experts; None where
    layers note none. row_by_row: rows are scored one by one."""
    parts: dict[type[PartPlan], Callable[[Any], StepPart]] = {
        MaskPlan: partial(MaskStep, lanes, mask),
        ScorePlan: partial(
            ScoreStep, lanes, whole_logits, 1 if row_by_row else rows_scored(vocab_size)
        ),
        VectorPlan: partial(VectorStep, lanes, whole_logits),
        NamedPlan: partial(NamedStep, lanes, gathered, 1 if row_by_row else BLOCK_ROWS),
    }
    if copies is not None:
        parts[CopyPlan] = partial(CopyStep, copies, rank)
    if adapters is not None:
        parts[AdapterPlan] = partial(AdapterStep, adapters)
    if images is not None:
        parts[ImagePlan] = partial(ImageStep, images, lambda slot: rank_of(slot) == rank)
    if experts is not None:
        parts[ExpertPlan] = partial(ExpertStep, lanes, experts)
    return parts
