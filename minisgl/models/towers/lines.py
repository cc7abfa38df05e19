"""What a tower derives from the number of lines that an image's patches stand in."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GRID = "image_grid_thw"
_FIND_TAPS = "get_vision_interpolation_indices_and_weights"


def derives_all(visual: Any) -> bool:
    """Whether a tower takes everything from `derive` that depends on the grid, so that it sends
    nothing to the GPU itself."""
    return _deriving() is not None and hasattr(visual, "num_grid_per_side")


def derive(visual: Any, grid: NDArray[Any], device: torch.device) -> dict[str, Tensor]:
    """The grid of an image, [1, 3], in host memory, and what `visual` would derive from it.

    Where a tower has its grid on the GPU, the host waits for the GPU in each layer, to know how
    many patches there are. Empty where this release of transformers takes nothing that is derived.
    """
    vision = _deriving()
    if vision is None:
        return {}
    here = torch.from_numpy(grid.astype(np.int64))
    merged = visual.spatial_merge_size
    read = {"position_ids": vision.get_vision_position_ids(here, merged)}
    if hasattr(visual, "num_grid_per_side"):  # its positions are weights, of another size
        read["interp_indices"], read["interp_weights"] = getattr(vision, _FIND_TAPS)(
            here,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    sent = {name: _sent(value, device) for name, value in read.items()}
    return {GRID: here, "cu_seqlens": vision.get_vision_cu_seqlens(here), **sent}


def take_grids(module: Any, device: torch.device) -> None:
    """Let a tower that embeds positions by the grid on the GPU, as GLM-V's do, take one in host
    memory."""

    def send(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        is_here = device.type == "cpu"
        return tuple(
            each if is_here or each.device.type != "cpu" else _sent(each, device) for each in args
        )

    if embeddings := getattr(getattr(module, "visual", None), "embeddings", None):
        embeddings.register_forward_pre_hook(send)


def _sent(value: Tensor, device: torch.device) -> Tensor:
    pinned = value.pin_memory() if device.type == "cuda" else value
    return pinned.to(device, non_blocking=True)


def _deriving() -> ModuleType | None:
    """transformers' module that derives it; None of a release whose towers do so themselves."""
    try:
        from transformers import vision_utils  # takes a second
    except ImportError:
        return None
    return vision_utils if hasattr(vision_utils, _FIND_TAPS) else None
