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

    @property
    def shown_token_ids(self) -> list[int]:
        """The ids as clients see them: of the vocabulary, also where an image has rows."""
        if not self.spans:
            return self.token_ids
        shown = [*self.token_ids]
        for span in self.spans:
            shown[span.start : span.end] = span.picture.token_ids
        return shown
