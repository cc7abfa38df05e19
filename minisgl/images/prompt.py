"""A prompt with images in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.images.picture import Span
from minisgl.request import Extra


@dataclass(frozen=True, slots=True)
class Prompt:
    """What `AsyncEngine.submit` takes of a conversation: ids, and extras for the images in it.

    The ids are negative where an image has rows.
    """

    token_ids: list[int]
    spans: Sequence[Span] = ()  # where the images are
    extras: list[Extra] = field(default_factory=list)
