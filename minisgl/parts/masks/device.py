"""The runner's half: brings the masks to the sampler."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minisgl.device.lanes import Lanes
from minisgl.matcher import MaskRows
from minisgl.parts.device_part import StepPart
from minisgl.parts.masks.host import MaskPlan


class MaskStep(StepPart):
    def __init__(
        self, lanes: Lanes, mask: Callable[[tuple[int, ...], Tensor], None], plan: MaskPlan
    ) -> None:
        """mask: of the sampler."""
        self._lanes = lanes
        self._mask = mask
        self._slots = plan.slots

    def change_sampling(self, masks: MaskRows) -> None:
        self._mask(self._slots, self._lanes.upload_masks(masks))
