"""The logprobs of exactly the tokens that the content of an answer consists of."""

from __future__ import annotations

from minisgl.events import Event
from minisgl.request import OutputDelta
from minisgl.server.alignment import PlacedToken
from minisgl.server.content_alignment import ContentAlignment
from minisgl.server.jobs import GenerationJob
from minisgl.server.schemas import RankedToken, ScoredToken
from minisgl.server.served_engine import ServedTokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class ContentScores:
    """Takes the tokens of each delta of an answer and then its events."""

    def __init__(self, job: GenerationJob, tokenizer: ServedTokenizer) -> None:
        skip = job.params.skip_special_tokens
        self._table = tokenizer.byte_table(skip_special_tokens=skip)
        self._tokenizer = tokenizer
        self._marker_ids = job.parser.marker_ids if job.parser else ()
        has_text = any(self._table[id] for id in job.prompt_token_ids)
        self._alignment = ContentAlignment(
            reasoning_end=job.style.reasoning_end if job.style else "",
            call_end=job.style.call_end if job.style else "",
            drops_first_space=tokenizer.drops_first_space and not has_text,
        )

    def add(self, delta: OutputDelta, *, token_ended: bool) -> None:
        """Add the tokens of `delta`; token_ended: the last one is not part of the text."""
        for token in delta.logprobs[:-1] if token_ended else delta.logprobs:
            id = token.token_id
            is_marker = id in self._marker_ids
            self._alignment.add(
                token, self._tokenizer.token_bytes(id) if is_marker else self._table[id]
            )

    def read(self, event: Event) -> list[PlacedToken]:
        """Go on with an event; returns the tokens of content that are complete."""
        return self._alignment.read(event)

    def finish(self) -> list[PlacedToken]:
        """The last token, of which the rest is no content."""
        return self._alignment.finish()


def scored_token(
    token: PlacedToken, tokenizer: ServedTokenizer | None, *, as_id: bool
) -> ScoredToken:
    """A token with its rivals, as clients get it. as_id: they are named by their ids."""
    scored = token.scored
    assert scored is not None
    name = named_by_id(scored.token_id) if as_id else token.text
    own = RankedToken(name, max(scored.logprob, LOWEST_LOGPROB), [*token.data])
    top = [
        own if id == scored.token_id else _rival(id, logprob, tokenizer, as_id)
        for id, logprob in scored.top
    ]
    return ScoredToken(own.token, own.logprob, own.bytes, top)


def named_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _rival(id: int, logprob: float, tokenizer: ServedTokenizer | None, as_id: bool) -> RankedToken:
    text = tokenizer.token_text(id) if tokenizer and not as_id else named_by_id(id)
    data = tokenizer.token_bytes(id) if tokenizer else b""
    return RankedToken(text, max(logprob, LOWEST_LOGPROB), [*data])
