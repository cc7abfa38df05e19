"""The tower of a checkpoint: transformers' own modules, which make rows of an image."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minisgl.errors import UnsupportedModelError
from minisgl.images.levels import LEVELS, PIXELS, TABLE
from minisgl.images.picture import BFLOAT16
from minisgl.models.adopted.names import names_of
from minisgl.models.adopted.reader import transformers_config
from minisgl.models.dummy import fill_randomly
from minisgl.models.filling import Places, fill_from_files
from minisgl.models.hub import safetensors_files
from minisgl.models.loader import DUMMY_SEED, stored_tensors
from minisgl.models.quantization import is_quantizable
from minisgl.models.targets import Destinations, Names, checkpoint_targets
from minisgl.models.towers.lines import GRID, derive, derives_all, take_grids
from minisgl.models.towers.sight import Sight

_TEXT = ("language_model", "text_model")  # names of the text part in models of transformers
_HEAD = "lm_head."
_DTYPES = {
    "<f2": torch.float16,
    "|u1": torch.uint8,
    "f": torch.float32,
    "i": torch.int64,
    "u": torch.int64,
    "b": torch.bool,
    BFLOAT16.kind: torch.bfloat16,
}


class Tower:
    """Makes the rows of images, each by itself."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        places: Places | None = None,
    ) -> None:
        """module: a model of transformers without its text part. places: of its weights."""
        self.module, self.places = module, places
        take_grids(module, device)
        self._dtype, self._device = dtype, device
        features: Any = module.get_image_features
        self._features = features
        self._takes = inspect.signature(features).parameters.keys()

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.module.parameters())

    @property
    def config(self) -> Any:
        return self.module.config.vision_config  # type: ignore[union-attr]

    @property
    def repeats(self) -> bool:
        """Whether `compute` does the same for all images of a shape, on the device alone."""
        return GRID in self._takes and derives_all(self.module.visual)

    @torch.inference_mode()
    def rows(self, inputs: Mapping[str, NDArray[Any]]) -> Tensor:
        """The rows of one image, [n, row_size]. inputs: what its processor has made of it.

        Queues its work on the current stream. Raises whatever the code of transformers raises.
        """
        return self.compute(self.sent(inputs, self.derived(inputs)))

    def derived(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """What depends on the shape of an image alone. Empty where the tower takes nothing such."""
        if GRID not in self._takes & inputs.keys():
            return {}
        return derive(self.module.visual, inputs[GRID], self._device)

    def sent(
        self, inputs: Mapping[str, NDArray[Any]], derived: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All that `compute` takes of an image, of which `derived` is there."""
        names = (self._takes | {LEVELS, TABLE}) & inputs.keys()
        return {**derived, **{name: self._sent(inputs[name]) for name in names - derived.keys()}}

    def compute(self, given: Mapping[str, Tensor]) -> Tensor:
        """The rows of an image, whose inputs are on the device."""
        given = dict(given)
        if LEVELS in given:
            given[PIXELS] = pixels_of(given.pop(LEVELS), given.pop(TABLE))
        found = self._features(**given, return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        sides = [_joined(each) for each in (found.pooler_output, *deep)]
        return torch.cat(sides, dim=1).to(self._dtype)

    def _sent(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, where numbers that are no integers have the model's dtype."""
        dtype = _DTYPES.get(array.dtype.str) or _DTYPES[array.dtype.kind]
        on_gpu = self._device.type == "cuda"
        sent = torch.empty(array.shape, dtype=dtype, pin_memory=on_gpu)
        if array.dtype == BFLOAT16:
            np.copyto(sent.view(torch.int16).numpy(), array.view(np.int16))
        else:
            np.copyto(sent.numpy(), array)
        moved = sent.to(self._device, non_blocking=True)
        return moved.to(self._dtype) if dtype.is_floating_point else moved


def pixels_of(levels: Tensor, table: Tensor) -> Tensor:
    """The numbers that levels stand for; shapes as in images/levels.py."""
    num_frames, num_channels, _ = table.shape
    patches = levels.view(len(levels), num_channels, 1, -1)
    size = (-1, -1, num_frames, -1)
    found = torch.empty_like(patches.expand(size), dtype=table.dtype)
    for channel in range(num_channels):
        of_channel = patches[:, channel, 0].int()
        for frame in range(num_frames):
            found[:, channel, frame] = table[frame, channel][of_channel]
    return found.flatten(1)


def _joined(features: Any) -> Tensor:
    """[n, hidden_size], of a tensor, or several, of any shape."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def load_tower(
    sight: Sight, folder: Path, *, dtype: torch.dtype, device: torch.device, load_format: str
) -> Tower:
    """Build the tower on `device`, and fill it from the files of a checkpoint. Blocks. Raises
    CheckpointError if a tensor is missing, or is another one than the tower has."""
    module, name_of = _skeleton(sight, dtype, device)
    # What transformers leaves aside itself, such as layers that draft.
    ignored: Any = module._keys_to_ignore_on_load_unexpected or ()

    def is_left_out(name: str) -> bool:
        is_of_text = name.startswith((*(f"{each}." for each in _TEXT), _HEAD))
        return is_of_text or any(re.search(each, name) for each in ignored)

    to = Destinations(
        targets={
            name.removeprefix("."): target  # of the model itself
            for name, target in checkpoint_targets(module, None).items()
        },
        stacks={},
        scheme=None,
        is_left_out=is_left_out,
    )
    places = Places(to, Names(name_of, is_quantizable))
    if load_format == "dummy":
        fill_randomly(module, device, DUMMY_SEED)
    else:
        fill_from_files(*places, safetensors_files(folder), lambda done, total: None)
    return Tower(module, dtype, device, places)


def check_weights(sight: Sight, folder: Path) -> None:
    """Raise UnsupportedModelError if the files have only the text part."""
    module, name_of = _skeleton(sight, torch.float32, torch.device("meta"))
    stored = stored_tensors(safetensors_files(folder), Names(name_of, is_quantizable))
    if missing := module.state_dict().keys() - stored.keys():
        raise UnsupportedModelError(f"its files lack {min(missing)}")


def _skeleton(
    sight: Sight, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, Callable[[str], str | None]]:
    """The modules that an image passes through, uninitialised, and how a checkpoint's tensors are
    called in them."""
    import transformers

    config = transformers_config(sight.values, sight.architecture)
    with torch.device("meta"):
        whole = getattr(transformers, sight.architecture)._from_config(config, dtype=dtype)
    name_of = names_of(whole)
    model = whole.model
    for name in _TEXT:
        if hasattr(model, name):
            setattr(model, name, nn.Identity())
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            made = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
            made._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(module, name, made)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.device(device):
        model.initialize_weights()
    return model.eval(), name_of
