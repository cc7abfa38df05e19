"""Sizes of the two kinds of pages of a model some of whose layers have a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of a prompt that a step can compute at least, however many requests run.
SPARE_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSizes:
    """What a request needs of the pages of windowed layers."""

    window: int  # the widest: a query sees its last `window` tokens, itself included
    page_size: int
    # Tokens of a request that all steps in flight and the next may compute beside each other.
    in_flight: int
    spare: int  # pages beside those that requests need, for the chunks of a step

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
        return min(self.span, int(-(-num_tokens // self.page_size)))
