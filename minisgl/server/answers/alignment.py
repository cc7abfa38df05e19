"""Aligns tokens with their text: the position and the part of each token, while the text grows.

The text is the output of a `Detokenizer`: it lags behind the tokens, has U+FFFD for invalid UTF-8,
and may be cut by a stop string, even inside a token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.request import TokenLogprobs
from minisgl.text.tokenizer import Tokenizer


@dataclass(slots=True)
class PlacedToken:
    """A token and its part of the text.

    The `text`s of all tokens joined are the whole text, and so are their `data` joined and decoded.
    """

    scored: TokenLogprobs | None  # None for the first token of a prompt
    data: bytes  # its bytes in the text; b"" if it is hidden, or after the end
    text: str  # the characters that it completes
    start: int  # position of the first character that it has a part in
    end: int  # position after the last of these characters
    opening: bytes  # the earlier bytes of an incomplete character that it continues

    def cut(self, num_chars: int) -> None:
        """Cut the token at the end of the text, `num_chars` characters."""
        num_left = max(num_chars - self.start, 0)
        self.start = min(self.start, num_chars)
        data, end = self.opening + self.data, 0
        for _ in range(num_left):
            end = _char_end(data, end)
        self.data = data[len(self.opening) : end]
        self.text = self.text[:num_left]


class Alignment:
    """Takes tokens and pieces of text as they arrive; returns each token once."""

    def __init__(self, *, start: int = 0, drops_first_space: bool = False) -> None:
        """`start`: number of characters before the first token."""
        self.num_chars = start  # completed by the tokens added so far
        self._num_shown = start
        self._drops_first_space = drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = b""  # the bytes of an incomplete character
        self._waiting: deque[PlacedToken] = deque()  # whose text has not arrived yet
        self._last: PlacedToken | None = None  # the last token with bytes

    def add(self, scored: TokenLogprobs | None, data: bytes) -> None:
        """Add the next token; `data` are the bytes that it adds to the text."""
        if self._drops_first_space and data:
            self._drops_first_space = False
            data = data.removeprefix(b" ")
        opening = self._pending
        text = self._decoder.decode(data)
        if self._last and opening and text and _char_end(opening + data[:4]) == len(opening):
            # The character breaks off before this token, so its U+FFFD belongs to the previous one.
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
        """Take `text`, the next piece; returns the tokens whose text is now complete.

        With the last piece these are all remaining tokens, cut at its end.
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
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    scored: Sequence[TokenLogprobs | None],
    text: str,
) -> list[PlacedToken]:
    """Align the tokens of a prompt with its `text`, in which special tokens may be written out.

    If the tokenizer normalizes the text first, positions are approximate.
    """
    if tokenizer is None:
        return [PlacedToken(score, b"", "", 0, 0, b"") for score in scored]
    written = tokenizer.byte_table(skip_special_tokens=False)
    visible = tokenizer.byte_table(skip_special_tokens=True)
    alignment = Alignment(drops_first_space=tokenizer.drops_first_space)
    for token_id, score in zip(token_ids, scored, strict=False):  # fewer if the request was aborted
        data = written[token_id]
        if data and not visible[token_id]:
            spelled = data.decode("utf-8", "replace")
            if not text.startswith(spelled, alignment.num_chars):
                data = b""
        alignment.add(score, data)
    return alignment.show(text, finished=True)


def _char_end(data: bytes, start: int = 0) -> int:
    """End of the character that starts at `start`; U+FFFD covers as many bytes as in `decode`."""
    window = data[start : start + 4]
    try:
        char = window.decode()[0]
    except UnicodeDecodeError as error:
        if error.start == 0:
            return start + error.end
        char = window[: error.start].decode()[0]
    return start + len(char.encode())
