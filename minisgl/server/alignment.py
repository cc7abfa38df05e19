"""Which tokens a text is made of: the place and the part of each, while the text grows.

The text is what a `Detokenizer` makes of the tokens: it lags behind them, U+FFFD stands for what is
no UTF-8, and a stop string may cut it, in the middle of a token too.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.request import TokenLogprobs
from minisgl.server.served_engine import ServedTokenizer


@dataclass(slots=True)
class PlacedToken:
    """A token and what it has in the text.

    The `text` of all tokens of a text joined is that text, and so is their `data` once decoded.
    """

    scored: TokenLogprobs | None  # None for the first token of a prompt
    data: bytes  # its bytes in the text; b"" if it is hidden, or behind the end
    text: str  # the characters that are complete with it
    start: int  # characters of the text before the first that it has a part in
    end: int  # characters up to the last of these
    opening: bytes  # the bytes before it of a character that it goes on with

    def cut(self, num_chars: int) -> None:
        """End it where the text ends, after `num_chars`."""
        num_left = max(num_chars - self.start, 0)
        self.start = min(self.start, num_chars)
        data, end = self.opening + self.data, 0
        for _ in range(num_left):
            end = _char_end(data, end)
        self.data = data[len(self.opening) : end]
        self.text = self.text[:num_left]


class Alignment:
    """Takes the tokens and the pieces of a text as they come; returns each token once."""

    def __init__(self, *, start: int = 0, drops_first_space: bool = False) -> None:
        """`start` characters are before the first token."""
        self.num_chars = start  # complete with the tokens added
        self._num_shown = start
        self._drops_first_space = drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = b""  # of a character that is not complete yet
        self._waiting: deque[PlacedToken] = deque()  # for the text that they are a part of
        self._last: PlacedToken | None = None  # that has bytes

    def add(self, scored: TokenLogprobs | None, data: bytes) -> None:
        """The next token; `data` are the bytes that it adds to the text."""
        if self._drops_first_space and data:
            self._drops_first_space = False
            data = data.removeprefix(b" ")
        opening = self._pending
        text = self._decoder.decode(data)
        if self._last and opening and data and _char_end(opening + data[:4]) == len(opening):
            # The character breaks off before this token, so that its U+FFFD is the last one's.
            self._last.text += text[0]
            self.num_chars += 1
            opening, text = b"", text[1:]
        start = self.num_chars
        self.num_chars += len(text)
        self._pending = self._decoder.getstate()[0]
        end = self.num_chars + bool(self._pending)
        token = PlacedToken(scored, data, text, start, end, opening)
        self._waiting.append(token)
        if data:
            self._last = token

    def show(self, text: str, *, finished: bool) -> list[PlacedToken]:
        """The tokens that `text`, the next piece, is the last to have a part of.

        When it is the last piece these are all that are left, cut at its end.
        """
        self._num_shown += len(text)
        if finished and self._last:
            self._last.text += self._decoder.decode(b"", True)
        shown = []
        while self._waiting and (finished or self._waiting[0].end <= self._num_shown):
            token = self._waiting.popleft()
            if token.end > self._num_shown:
                token.cut(self._num_shown)
            shown.append(token)
        return shown


def place_prompt(
    tokenizer: ServedTokenizer | None,
    token_ids: Sequence[int],
    scored: Sequence[TokenLogprobs | None],
    text: str,
) -> list[PlacedToken]:
    """The tokens of a prompt in its `text`, where special ones may be written out or not.

    A text that the tokenizer changes before it takes it apart has them near their places only.
    """
    if tokenizer is None:
        return [PlacedToken(score, b"", "", 0, 0, b"") for score in scored]
    written = tokenizer.byte_table(skip_special_tokens=False)
    visible = tokenizer.byte_table(skip_special_tokens=True)
    alignment = Alignment(drops_first_space=tokenizer.drops_first_space)
    for token_id, score in zip(token_ids, scored, strict=False):  # fewer when it was aborted
        data = written[token_id]
        if data and not visible[token_id]:
            spelled = data.decode("utf-8", "replace")
            if not text.startswith(spelled, alignment.num_chars):
                data = b""
        alignment.add(score, data)
    return alignment.show(text, finished=True)


def _char_end(data: bytes, start: int = 0) -> int:
    """Where the character ends that starts there; U+FFFD stands for as much as in `decode`."""
    window = data[start : start + 4]
    try:
        char = window.decode()[0]
    except UnicodeDecodeError as error:
        if error.start == 0:
            return start + error.end
        char = window[: error.start].decode()[0]
    return start + len(char.encode())
