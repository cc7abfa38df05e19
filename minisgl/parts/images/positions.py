"""Positions of the tokens of a prompt with images, where a model counts them in three directions.

A token of text has the same position in each. The rows of an image begin where the text before it
ends, and count its frames, its lines, and the places in a line; the text behind it goes on after
the largest of these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minisgl.images.picture import Span


def rope_positions(spans: Sequence[Span]) -> tuple[NDArray[np.int32], int]:
    """The positions of the tokens up to the last row of an image, [3, n]: by frame, by line, and
    within a line; and how much larger those of all later tokens are than their places."""
    parts: list[NDArray[np.int32]] = [np.zeros((3, 0), np.int32)]
    at = position = 0  # the next token, and its position
    for span in spans:
        picture = span.picture
        assert picture.grid is not None, "an image without lines"
        places = span.start + np.flatnonzero(picture.is_row)
        num_before = int(places[0]) - at
        before = np.arange(position, position + num_before, dtype=np.int32)
        position += num_before
        rows = np.indices(picture.grid, dtype=np.int32).reshape(3, -1)
        parts += [np.broadcast_to(before, (3, num_before)), position + rows]
        at, position = int(places[-1]) + 1, position + max(picture.grid)
    return np.concatenate(parts, axis=1), position - at
