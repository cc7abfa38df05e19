"""The logprobs of exactly the tokens that the content of an answer consists of."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from minisgl.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from minisgl.request import OutputDelta, TokenLogprobs
from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.jobs import GenerationJob
from minisgl.text.parsing.emitter import GAP
from minisgl.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class RankedToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(RankedToken):
    top_logprobs: list[RankedToken]


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


class ContentScores:
    """Takes the tokens of each delta of an answer and then its events.

    What reasoning and calls are made of is skipped where their text is what the model wrote. Where
    it is not, as for the arguments of XML calls, the next content is looked for behind the call.
    """

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        skip = job.params.skip_special_tokens
        self._table = tokenizer.byte_table(skip_special_tokens=skip)
        self._tokenizer = tokenizer
        self._marker_ids = job.parser.marker_ids if job.parser else ()
        # The closing markers, "" where there are none.
        self._reasoning_end = job.style.reasoning_end if job.style else ""
        self._call_end = job.style.call_end if job.style else ""
        self._body = job.style.body if job.style else ""
        # The kind of the last event: another one is in another message, behind its header.
        self._kind = job.style.begun if job.style else None
        has_text = any(self._table[id] for id in job.prompt_token_ids)
        self._drops_first_space = tokenizer.drops_first_space and not has_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: deque[_Piece] = deque()
        self._text = ""  # of the pieces, as far as it has not been read
        self._passing = ""  # the closing marker that comes before the next content

    def add(self, delta: OutputDelta, *, token_ended: bool) -> None:
        """Add the tokens of `delta`; token_ended: the last one is not part of the text."""
        for token in delta.logprobs[:-1] if token_ended else delta.logprobs:
            id = token.token_id
            data = self._tokenizer.token_bytes(id) if id in self._marker_ids else self._table[id]
            if self._drops_first_space and data:
                self._drops_first_space = False
                data = data.removeprefix(b" ")
            text = self._decoder.decode(data)
            self._text += text
            self._pieces.append(_Piece(token, data, text))
        if delta.finish_reason is not None and self._pieces:
            # Of a character that the end has broken off.
            rest = self._decoder.decode(b"", True)
            self._text += rest
            self._pieces[-1].text += rest

    def read(self, event: Event) -> list[PlacedToken]:
        """Go on with an event; returns the tokens of content that are complete."""
        in_message = isinstance(event, ContentText | ReasoningText | CallArguments)
        if self._body and in_message and type(event) is not self._kind:
            self._kind, self._passing = type(event), self._body
            if not isinstance(event, ContentText):
                return self._pass() + self._skip(event)
        match event:
            case ContentText(text):
                shown = self._pass()
                start = self._text.find(text)
                if start < 0:  # what comes between two texts is no token's
                    text = text.removeprefix(GAP)
                    start = self._text.find(text)
                if start < 0:
                    return shown
                return shown + self._walk(start) + self._walk(len(text), keep=True)
            case _:
                return self._skip(event)

    def _skip(self, event: Event) -> list[PlacedToken]:
        """Go on with an event that is no content."""
        match event:
            case ReasoningText(text) | CallStart(name=text) | CallArguments(text=text):
                if not self._body:
                    is_reasoning = isinstance(event, ReasoningText)
                    self._passing = self._reasoning_end if is_reasoning else self._call_end
                start = self._text.find(text)
                return self._walk(start + len(text)) if start >= 0 else []
            case _:
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


def scored_token(token: PlacedToken, tokenizer: Tokenizer | None, *, as_id: bool) -> ScoredToken:
    """A token with its rivals, as clients get it. as_id: they are named by their ids."""
    scored = token.scored
    assert scored is not None
    name = named_by_id(scored.token_id) if as_id else token.text
    own = RankedToken(name, max(scored.logprob, LOWEST_LOGPROB), [*token.data])
    top = [
        own if id == scored.token_id else _rival(id, logprob, tokenizer, as_id)
        for id, logprob in scored.others.items()
    ]
    return ScoredToken(own.token, own.logprob, own.bytes, top)


def named_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _rival(id: int, logprob: float, tokenizer: Tokenizer | None, as_id: bool) -> RankedToken:
    text = tokenizer.token_text(id) if tokenizer and not as_id else named_by_id(id)
    data = tokenizer.token_bytes(id) if tokenizer else b""
    return RankedToken(text, max(logprob, LOWEST_LOGPROB), [*data])
