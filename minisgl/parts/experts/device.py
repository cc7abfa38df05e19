"""The runner's half: what the layers with experts have noted of the rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.device.lanes import HostCopy, Lanes
from minisgl.errors import UnsupportedModelError
from minisgl.layers.experts import FusedExperts
from minisgl.models.transformer import CausalLM
from minisgl.parts.device_part import StepPart
from minisgl.parts.experts.host import ExpertPlan

if TYPE_CHECKING:
    from minisgl.models.adopted.model import AdoptedModel


def note_experts(
    model: CausalLM | AdoptedModel, num_rows: int, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Let the layers note the experts of the rows of each step, up to `num_rows`. shape: layers,
    and experts that a row takes in each. Returns where: [num_rows, *shape] int16. Raises
    UnsupportedModelError."""
    module = model if isinstance(model, CausalLM) else model.module
    layers = [each for each in module.modules() if isinstance(each, FusedExperts)]
    if len(layers) != shape[0]:
        reason = "--return-routed-experts: the code of this model chooses experts by itself."
        raise UnsupportedModelError(reason)
    noted = torch.zeros((num_rows, *shape), dtype=torch.int16, device=device)
    for index, layer in enumerate(layers):
        layer.noted = noted[:, index]
    return noted


class ExpertStep(StepPart):
    def __init__(self, lanes: Lanes, noted: Tensor, plan: ExpertPlan) -> None:
        """noted: of note_experts."""
        self._lanes, self._noted, self._rows = lanes, noted, plan.rows
        self._copy: HostCopy | None = None

    def end(self) -> None:
        """Copy them, before the next step notes its own."""
        (rows,) = self._lanes.upload([self._rows])
        self._copy = self._lanes.download([self._noted.index_select(0, rows)])

    def outcome(self) -> bytes:
        """The experts of the plan's rows, one after the other."""
        assert self._copy is not None
        return self._copy.wait()[0].numpy().tobytes()
