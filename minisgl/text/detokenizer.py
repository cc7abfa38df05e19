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
            token_id < 0 or self._byte_table[token_id]  # a negative one is of an image
            for token_id in prompt_token_ids
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

    __slots__ = ("_held", "_include", "_num_unmatched", "_strings", "found")

    def __init__(self, strings: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        """`include`: the text keeps the string. Before `min_tokens` tokens none is found."""
        self.found: str | None = None
        self._strings = tuple(strings)
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
        num_read = len(self._held)
        text = self._held + text
        first = held_from = len(text)
        for stop in self._strings:
            # What ended in an earlier piece was not to be found, so it is not looked at again.
            begun = text.find(stop[0], max(0, num_read - len(stop) + 1))
            if begun < 0:
                continue
            if self._num_unmatched < 0 and 0 <= (start := text.find(stop, begun)) < first:
                first, self.found = start, stop
            begun = text.find(stop[0], max(begun, len(text) - len(stop) + 1))
            while 0 <= begun < held_from and not stop.startswith(text[begun:]):
                begun = text.find(stop[0], begun + 1)
            if 0 <= begun < held_from:
                held_from = begun
        if self.found is not None:
            return text[:first] + self.found if self._include else text[:first]
        self._held = text[held_from:]
        return text[:held_from]

    def release(self) -> str:
        """Return what may have become a match; the next one begins after it."""
        held, self._held = self._held, ""
        return held
