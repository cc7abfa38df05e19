"""Pixels as the 256 levels that files have, and the numbers that processors make of these.

Levels take a quarter of the bytes, and less time of the processor. The device looks up the numbers,
which are in every bit those of the processor, since it has made the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = "pixel_values"  # an output of processors
# In its place: [num_patches, num_channels * n] uint8, and the numbers that these stand for in each
# frame and channel, [num_frames, num_channels, 256].
LEVELS, TABLE = "pixel_levels", "pixel_table"
NUM_CHANNELS, NUM_LEVELS = 3, 256
# Asks a processor for levels, and for one of the equal frames that it makes of an image.
AS_LEVELS = {"do_rescale": False, "do_normalize": False, "temporal_patch_size": 1}

Inputs = dict[str, NDArray[Any]]
# The tokens that replace the placeholder of an image, and what the processor returns of it.
Run = Callable[..., tuple[list[int], Inputs]]


@dataclass(frozen=True, slots=True, eq=False)
class LevelProcessor:
    """A processor that makes patches of frames, run for its levels alone."""

    images: Any  # its part for images
    row_id: int
    table: NDArray[Any]

    @classmethod
    def of(cls, images: Any, row_id: int, run: Run) -> LevelProcessor | None:
        """None unless two images, of which one is resized, show that the numbers are looked up, and
        that an image is replaced by a token for each row. run: runs the whole processor."""
        if not hasattr(images, "temporal_patch_size"):
            return None
        side = images.patch_size * images.merge_size
        side *= -(-16 // side)  # so that each channel has all levels
        every = np.arange(side * side * NUM_CHANNELS).reshape(side, side, NUM_CHANNELS)
        noise = np.random.default_rng(0).integers(0, NUM_LEVELS, (3 * side - 5, 2 * side + 9, 3))
        table = None
        for pixels, options in ((every, {"do_resize": False}), (noise, {})):
            image = _image(pixels)
            ids, wanted = run(image, **options)
            if table is None:
                levels = cls(images, row_id, _NO_TABLE)._inputs(image, options)[LEVELS]
                table = _filled(levels, wanted[PIXELS])
            if table is None:
                return None
            found = cls(images, row_id, table)
            made = found._inputs(image, options)
            made[PIXELS] = numbers_of(made.pop(LEVELS), made.pop(TABLE))
            if ids != found._tokens(made) or made.keys() != wanted.keys():
                return None
            if not all(np.array_equal(made[name], wanted[name]) for name in made):
                return None
        return found

    def __call__(self, image: Image) -> tuple[list[int], Inputs]:
        """As Run, with levels in the place of pixels."""
        inputs = self._inputs(image, {})
        return self._tokens(inputs), inputs

    def _inputs(self, image: Image, options: Mapping[str, Any]) -> Inputs:
        made = self.images(images=[image], return_tensors="np", **AS_LEVELS, **options)
        inputs = {name: np.asarray(value) for name, value in made.items()}
        inputs[LEVELS] = inputs.pop(PIXELS).astype(np.uint8, copy=False)
        return {**inputs, TABLE: self.table}

    def _tokens(self, inputs: Mapping[str, NDArray[Any]]) -> list[int]:
        num_patches = int(inputs["image_grid_thw"].prod())
        return [self.row_id] * (num_patches // self.images.merge_size**2)


def numbers_of(levels: NDArray[Any], table: NDArray[Any]) -> NDArray[Any]:
    """The numbers that levels stand for, [num_patches, num_channels * num_frames * n]."""
    channels = np.split(levels, NUM_CHANNELS, axis=1)
    found = [table[:, number, each].swapaxes(0, 1) for number, each in enumerate(channels)]
    return np.stack(found, axis=1).reshape(len(levels), -1)


_NO_TABLE = np.zeros((1, NUM_CHANNELS, NUM_LEVELS), np.float32)


def _filled(levels: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any] | None:
    """The table by which all levels become these numbers; None if their shapes do not fit."""
    num_frames, rest = divmod(numbers.size, levels.size)
    if rest or numbers.ndim != 2 or numbers.dtype.kind != "f" or len(levels) != len(numbers):
        return None
    of_frames = numbers.reshape(len(levels), NUM_CHANNELS, num_frames, -1)
    table = np.zeros((num_frames, NUM_CHANNELS, NUM_LEVELS), numbers.dtype)
    for channel, found in enumerate(np.split(levels, NUM_CHANNELS, axis=1)):
        table[:, channel, found] = of_frames[:, channel].swapaxes(0, 1)
    return table


def _image(pixels: NDArray[Any]) -> Image:
    import PIL.Image

    return PIL.Image.fromarray(pixels.astype(np.uint8))
