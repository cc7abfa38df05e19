"""The largest image that a tower may get, for measuring the memory that it takes."""

from __future__ import annotations

import math
from typing import Any

import torch

from minisgl.models.towers.sight import SEEING, Kind, Sight
from minisgl.models.towers.small import Inputs, inputs_of

_MERGED = 2  # patches a side that make a row, of towers that take all pixels

# Of an image, or of a tile, by what processors allow.
_MOST_ROWS = {Kind.PLACED: 1120, Kind.PATCHED: 256}
# Of those that cut no image into many tiles.
_MOST_PIECES = {
    "Gemma3ForConditionalGeneration": 5,
    "Gemma4ForConditionalGeneration": 1,
    "LlavaForConditionalGeneration": 1,
    "VipLlavaForConditionalGeneration": 1,
}


def most_pieces(sight: Sight, num_rows: int, rows_each: int) -> int:
    """In how many pieces a tower may get an image of so many rows."""
    return min(-(-num_rows // rows_each), _MOST_PIECES.get(sight.architecture, num_rows))


def largest_inputs(sight: Sight, tower: Any, num_rows: int) -> Inputs:
    """What a tower takes of an image of so many rows or fewer, as large as it can be in one piece;
    of those that cut images into tiles, which they encode alike, a few. tower: its config."""
    kind = SEEING[sight.architecture]
    lines = max(1, math.isqrt(num_rows))
    if kind in _MOST_ROWS:
        num_rows = min(num_rows, _MOST_ROWS[kind])
        lines = math.isqrt(num_rows)
    if kind in (Kind.LINES, *_MOST_ROWS):
        return inputs_of(kind, tower, (lines, num_rows // lines))
    if kind is Kind.SIZED:  # up to the size that it has positions for
        num_patches = min(_MERGED * lines, tower.image_size // tower.patch_size)
        side = num_patches // _MERGED * _MERGED * tower.patch_size
        pixels = torch.randn(1, 3, side, side).numpy()
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]]).numpy()}
    return inputs_of(kind, tower, (1, 1))
