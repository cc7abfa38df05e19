"""Reuses tokens that the engine has seen where the chat template gives the same text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from .text_format import num_common


def keep_seen(
    seen: Sequence[int], templated: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[int]:
    """Replaces the beginning of `templated` with tokens of `seen`, as far as both texts agree.

    An answer is text by the time the template sees it again, and the tokenizer may cut that text
    otherwise than the model did. The KV cache knows the model's tokens, so they are kept. Where
    the texts differ too (a template may trim an answer or leave out its reasoning), the template
    counts.
    """
    ours, theirs = Reading(seen, token_bytes), Reading(templated, token_bytes)
    agreed = num_common(ours.text, theirs.text)
    both = ours.num_tokens.keys() & theirs.num_tokens.keys()
    length = max(length for length in both if length <= agreed)
    return [*seen[: ours.num_tokens[length]], *templated[theirs.num_tokens[length] :]]


class Reading:
    """Tokens as text, with the number of tokens for each length where they can be cut."""

    def __init__(self, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> None:
        self.num_tokens = {0: 0}  # by number of characters
        # What is not UTF-8 reads as U+FFFD, as it did in the answer.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, length = [], 0
        for count, token_id in enumerate(token_ids, 1):
            pieces.append(decoder.decode(token_bytes(token_id)))
            length += len(pieces[-1])
            unfinished, _ = decoder.getstate()
            if not unfinished:
                self.num_tokens[length] = count
        self.text = "".join(pieces)
