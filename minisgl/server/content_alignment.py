"""Finds the tokens that content consists of, in an answer that has reasoning and calls as well."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field

from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from minisgl.request import TokenLogprobs
from minisgl.server.alignment import PlacedToken


@dataclass(slots=True)
class _Piece:
    """A token with the text that it completes."""

    scored: TokenLogprobs
    data: bytes
    text: str
    num_read: int = 0
    kept: list[str] = field(default_factory=list)  # of its text, what is content

    def placed(self) -> PlacedToken:
        text = "".join(self.kept)
        data = self.data if text == self.text else text.encode()
        return PlacedToken(self.scored, data, text, 0, 0, b"")


class ContentAlignment:
    """Takes the tokens of an answer and then the events that they make, as they arrive.

    What reasoning and calls are made of is skipped where their text is what the model wrote. Where
    it is not, as for the arguments of XML calls, the next content is looked for behind the call.
    """

    def __init__(self, *, reasoning_end: str, call_end: str, drops_first_space: bool) -> None:
        """reasoning_end, call_end: the closing markers, "" where there are none."""
        self._reasoning_end = reasoning_end
        self._call_end = call_end
        self._drops_first_space = drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: deque[_Piece] = deque()
        self._text = ""  # of the pieces, as far as it has not been read
        self._passing = ""  # the closing marker that comes before the next content

    def add(self, scored: TokenLogprobs, data: bytes) -> None:
        """Add the next token; `data` are the bytes that it adds to the text."""
        if self._drops_first_space and data:
            self._drops_first_space = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data)
        self._text += text
        self._pieces.append(_Piece(scored, data, text))

    def read(self, event: Event) -> list[PlacedToken]:
        """Go on with an event; returns the tokens of content that are complete."""
        match event:
            case ContentText(text):
                shown = self._pass()
                start = self._text.find(text)
                if start < 0:
                    return shown
                return shown + self._walk(start) + self._walk(len(text), keep=True)
            case ReasoningText(text) | CallStart(name=text) | CallArguments(text=text):
                is_reasoning = isinstance(event, ReasoningText)
                self._passing = self._reasoning_end if is_reasoning else self._call_end
                start = self._text.find(text)
                return self._walk(start + len(text)) if start >= 0 else []
            case CallEnd():
                return []

    def finish(self) -> list[PlacedToken]:
        """The last token, of which the rest is no content."""
        return [piece.placed() for piece in self._pieces if piece.kept]

    def _pass(self) -> list[PlacedToken]:
        marker, self._passing = self._passing, ""
        start = self._text.find(marker) if marker else -1
        return self._walk(start + len(marker)) if start >= 0 else []

    def _walk(self, count: int, *, keep: bool = False) -> list[PlacedToken]:
        """Read so many characters; returns the tokens that are complete and have content."""
        shown: list[PlacedToken] = []
        self._text = self._text[count:]
        while count and self._pieces:
            piece = self._pieces[0]
            part = piece.text[piece.num_read : piece.num_read + count]
            piece.num_read += len(part)
            count -= len(part)
            if keep and (part or piece.data):
                piece.kept.append(part)
            if piece.num_read < len(piece.text):
                break
            self._pieces.popleft()
            if piece.kept:
                shown.append(piece.placed())
        return shown
