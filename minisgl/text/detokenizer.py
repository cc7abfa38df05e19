"""Turns token ids into text as they are generated, returning text as soon as it is final."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from minisgl.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes the output of one request. Not thread-safe.

    `push` each output token, then `flush`; the concatenated pieces are the decoded output. Do not
    push a token that ended the request (EOS or a stop token): it is not part of the text. Text is
    held back only while a character is incomplete or a suffix may become a stop string, so the cost
    of a token is independent of the number of tokens before it.

    A stop string matches if the token that completes it is output token `min_tokens` or a later
    one, wherever the match began. If one token completes several, the one that begins first wins,
    then the one listed first.
    """

    __slots__ = (
        "_byte_table",
        "_decode",
        "_drops_first_space",
        "_stops",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        self.stopped: str | None = None  # the stop string that was found; later pushes add nothing
        self._byte_table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # The space before the first word belongs to the encoding only where a text begins.
        self._drops_first_space = tokenizer.drops_first_space and not any(
            self._byte_table[token_id] for token_id in prompt_token_ids
        )
        self._stops = StopStrings(stop, include_stop, min_tokens) if stop else None

    def push(self, token_id: int) -> str:
        """Add the next output token; returns the text that became final."""
        text = self._text_of(token_id)
        if self._stops is None:
            return text
        self._stops.count_token()
        final = self._stops.match(text)
        self.stopped = self._stops.found
        return final

    def _text_of(self, token_id: int) -> str:
        """The text that the next token completes, whatever stops it."""
        data = self._byte_table[token_id]
        if self._drops_first_space and data:
            self._drops_first_space = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self, *, natural: bool = True) -> str:
        """Return the rest of the text at the end of the output; a broken character is U+FFFD.

        natural: whether the model has ended it, which matters only to a detokenizer that parses.
        """
        if self.stopped is not None:
            return ""
        held = self._stops.release() if self._stops is not None else ""
        return held + self._decode(b"", True)


class StopStrings:
    """Cuts a text that arrives in pieces off at the first of some strings."""

    __slots__ = ("_held", "_include", "_matchers", "_num_unmatched", "found")

    def __init__(self, strings: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        """`include`: the text keeps the string. Before `min_tokens` tokens none is found."""
        self.found: str | None = None
        self._matchers = [_StopMatcher(text) for text in strings]
        self._include = include
        self._num_unmatched = min_tokens - 1  # tokens yet to come that cannot complete a match
        self._held = ""  # the longest end of the text that is the beginning of a string

    def count_token(self) -> None:
        """Call for each token, before its text is matched."""
        self._num_unmatched -= 1

    def match(self, text: str) -> str:
        """Take the next piece; returns the text that is final, nothing after a match."""
        if self.found is not None:
            return ""
        may_stop = self._num_unmatched < 0
        text = self._held + text
        first = len(text)
        for matcher in self._matchers:
            end = matcher.find(text, len(self._held))
            while not may_stop and end is not None:
                end = matcher.find(text, end)
            if end is not None and end - len(matcher.stop) < first:
                first = end - len(matcher.stop)
                self.found = matcher.stop
        if self.found is not None:
            return text[:first] + self.found if self._include else text[:first]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        num_final = len(text) - num_held
        self._held = text[num_final:]
        return text[:num_final]

    def release(self) -> str:
        """Return what may have become a match; the next one begins after it."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return held


class _StopMatcher:
    """Searches for one string in a text that arrives in pieces, reading each character once.

    Knuth, Morris, Pratt: Fast Pattern Matching in Strings, SIAM J. Comput. 6 (1977).
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # length of the longest prefix of `stop` that ends the text so far
        # The failure function: for `stop[: n + 1]`, the length of its longest proper prefix that is
        # also a suffix.
        borders = [0]
        self._borders: Sequence[int] = borders
        for char in stop[1:]:
            borders.append(self._advance(borders[-1], char))
        # The garbage collector, which pauses all threads, traverses lists but untracks such tuples.
        self._borders = tuple(borders)

    def find(self, text: str, start: int) -> int | None:
        """The end of the next match in `text`, of which the part before `start` has been read."""
        position, num_matched = start, self.num_matched
        while position < len(text):
            if num_matched == 0:  # skip with str.find, in C, to the next possible beginning
                position = text.find(self.stop[0], position)
                if position < 0:
                    break
            num_matched = self._advance(num_matched, text[position])
            position += 1
            if num_matched == len(self.stop):
                self.num_matched = self._borders[-1]
                return position
        self.num_matched = num_matched
        return None

    def _advance(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
