"""Goes some way into a grammar, to see whether answers can be followed through it."""

from __future__ import annotations

import random
import time

import numpy as np
from llguidance import LLMatcher

from minisgl.grammar.vocabulary import Outline, byte_ids
from minisgl.matcher import MASK_LIMIT_S

MAX_STEPS = 48
# What leads further into a JSON text; other characters make its strings longer.
LEADING = b'{["'
TOO_WIDE = (
    "it takes too long to follow: after a few tokens there are too many ways to go on, as with a "
    "thousand optional properties, or ambiguous rules; make it smaller, or split it."
)


def walk(matcher: LLMatcher, outline: Outline) -> str:
    """Follow an answer for MAX_STEPS tokens; returns the reason against the grammar, "" for none.

    matcher: at the beginning, over the `sketch` of `outline`. With the real vocabulary no token
    takes less time, so what is too slow here is too slow for every answer that comes there.
    """
    rng = random.Random(0)
    matcher = matcher.deep_copy()
    ends = {*outline.eos_token_ids}
    bytes_of_sketch = byte_ids(outline)
    leading = {bytes_of_sketch[byte] for byte in LEADING} | {*outline.special} - ends
    for _ in range(MAX_STEPS):
        allowed = _ids_in(matcher.compute_bitmask()) - ends
        if not allowed:
            return ""
        token_id = rng.choice(sorted(allowed & leading or allowed))
        before = matcher.deep_copy()
        seconds = _seconds_of(matcher, token_id)
        if seconds > MASK_LIMIT_S:  # once more: the first time has filled caches
            seconds = _seconds_of(before, token_id)
        if matcher.is_error() or seconds > MASK_LIMIT_S:
            return TOO_WIDE
    return ""


def _seconds_of(matcher: LLMatcher, token_id: int) -> float:
    began = time.thread_time()
    matcher.consume_token(token_id)
    return time.thread_time() - began


def _ids_in(mask: bytes) -> set[int]:
    """The tokens that a mask allows."""
    data = np.frombuffer(mask, np.uint8)
    places = np.flatnonzero(data)
    rows, bits = np.nonzero(np.unpackbits(data[places, None], axis=1, bitorder="little"))
    return {*(places[rows] * 8 + bits).tolist()}
