"""Sizes of the two kinds of pages of a model some of whose layers have a sliding window."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minisgl.config.facts import AttentionSpec, KVSpec, LayerSpec, ModelFacts, page_bytes

# Tokens of a prompt that a step can compute at least, however many requests run.
SPARE_TOKENS = 2048
COUNTED_RUN = 8  # tokens that a decode row samples in a step, as counted at least
# Tokens of the requests for which memory is divided: so many windows, or so many tokens if that is
# more. Shorter requests lack windowed pages first, longer ones full pages.
TYPICAL_WINDOWS = 4
TYPICAL_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSizes:
    """What a request needs of the pages of windowed layers."""

    window: int  # the widest: a query sees its last `window` tokens, itself included
    page_size: int
    # Tokens of a request that the steps in flight, and the next one, may compute.
    in_flight: int
    spare: int  # pages beside those that requests need, for the chunks of a step
    pages_each: int = 1  # of full layers, into which one of windowed layers fits

    @staticmethod
    def of(
        model: ModelFacts,
        page_size: int,
        max_seq_len: int,
        max_prefill_length: int,
        num_stages: int,
        max_run: int,
    ) -> WindowSizes | None:
        """None if no layer of the model itself has a window shorter than the longest sequence: for
        layers that draft it makes no second kind of pages. max_run: of a decode row in a step."""
        layers = (spec for spec in model.layers if isinstance(spec, AttentionSpec))
        windows = [spec.window for spec in layers if spec.window is not None]
        windows = [window for window in windows if window < max_seq_len]
        if not windows:
            return None
        spare = min(SPARE_TOKENS, max_prefill_length, max_seq_len)
        return WindowSizes(
            window=max(windows),
            page_size=page_size,
            in_flight=(num_stages + 1) * max(COUNTED_RUN, max_run),
            spare=-(-spare // page_size),
        )

    @property
    def num_behind(self) -> int:
        """Number of pages at the end of a request's that may have no settled token yet."""
        return 1 - (-self.in_flight // self.page_size)

    @property
    def span(self) -> int:
        """Number of pages that a request needs at once at most, beside those of a chunk."""
        return self.num_behind - (-(self.window - 1) // self.page_size)

    def first_seen(self, num_pages: int) -> int:
        """The first page that a query sees at the first position behind `num_pages` pages."""
        return max(0, (num_pages * self.page_size - self.window + 1) // self.page_size)

    def num_needed(self, num_tokens: float) -> int:
        """Number of pages that a request of so many tokens needs at once at most."""
        return min(self.span, math.ceil(num_tokens / self.page_size))

    def pages_for(self, num_requests: int) -> int:
        """Number of pages with which so many requests never wait for one, the scratch page
        included."""
        return 1 + self.spare + num_requests * self.span

    def typical_pages(self, max_seq_len: int) -> int:
        """Number of full pages that a typical request has."""
        num_tokens = min(max_seq_len, max(TYPICAL_TOKENS, TYPICAL_WINDOWS * self.window))
        return -(-num_tokens // self.page_size)

    def has(self, spec: LayerSpec) -> bool:
        """Whether a layer's KV cache has the pages of windowed layers."""
        return isinstance(spec, KVSpec) and self.hold_all_of(spec)

    def hold_all_of(self, spec: KVSpec | AttentionSpec) -> bool:
        """Whether those pages hold all that a layer sees."""
        return spec.window is not None and spec.window <= self.window

    def page_bytes(self, layers: Sequence[LayerSpec]) -> PageBytes:
        """Bytes of a page in the KV caches of full, and of windowed layers."""
        windowed = page_bytes(filter(self.has, layers), self.page_size)
        return PageBytes(page_bytes(layers, self.page_size) - windowed, windowed)


class PageBytes(NamedTuple):
    """Bytes of a page."""

    full: int
    windowed: int


def divide(
    sizes: WindowSizes, layers: Sequence[LayerSpec], room: int, max_seq_len: int
) -> tuple[int, int]:
    """The numbers of pages of full and of windowed layers that fit into `room` bytes, so that both
    suffice for as many typical requests, those in the prefix cache included. sys.maxsize pages of a
    kind that no layer of this stage has."""
    full, windowed = sizes.page_bytes(layers)
    if not windowed:
        return room // full if full else sys.maxsize, sys.maxsize
    typical = sizes.typical_pages(max_seq_len)
    left = room - full - (1 + sizes.spare) * windowed
    num_requests = max(1.0, left / (typical * full + sizes.span * windowed))
    num_windowed = 1 + sizes.spare + int(num_requests * sizes.span)
    if not full:
        return sys.maxsize, num_windowed
    return max(0, room - num_windowed * windowed) // full, num_windowed
