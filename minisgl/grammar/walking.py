"""Goes some way into a grammar, to see whether answers can be followed through it."""

from __future__ import annotations

import random
import time

from llguidance import LLMatcher

from minisgl.grammar.vocabulary import Outline, byte_ids
from minisgl.matcher import MASK_LIMIT_S

MAX_STEPS = 24
# What leads further into a JSON text, unlike the other characters of a string, and blanks.
LEADING, BLANKS = b'{["', b" \t\r\n"
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
    beginning, matcher = matcher, matcher.deep_copy()
    id_of = byte_ids(outline)
    special = outline.special.keys() - outline.eos_token_ids
    known = [*id_of, *sorted(special)]
    leading = special.union(id_of[byte] for byte in LEADING)
    blanks = {id_of[byte] for byte in BLANKS}
    taken: list[int] = []
    while len(taken) < MAX_STEPS:
        mask = matcher.compute_bitmask()
        allowed = [id for id in known if mask[id >> 3] >> (id & 7) & 1]
        if not allowed:
            return ""
        further = [id for id in allowed if id in leading]
        others = [id for id in allowed if id not in blanks]
        token_id = rng.choice(further or others or allowed)
        seconds = _seconds_of(matcher, token_id)
        if seconds > MASK_LIMIT_S:  # once more: the first time has filled caches
            again = beginning.deep_copy()
            again.consume_tokens(taken)
            seconds = _seconds_of(again, token_id)
        if matcher.is_error() or seconds > MASK_LIMIT_S:
            return TOO_WIDE
        taken.append(token_id)
    return ""


def _seconds_of(matcher: LLMatcher, token_id: int) -> float:
    began = time.thread_time()
    matcher.consume_token(token_id)
    return time.thread_time() - began
