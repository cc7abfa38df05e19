"""Answers in chunks, as /v1/chat/completions and /v1/completions stream them.

Everything is built from the types in `schemas` and encoded by msgspec, except the one frequent
event: a delta of text. A server sends up to 30,000 of them a second, so each choice encodes that
event once, cuts it where its text is, and then encodes texts only.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType

from minisgl.request import OutputDelta, TokenLogprobs
from minisgl.server.alignment import Alignment, PlacedToken, place_prompt
from minisgl.server.content_scores import LOWEST_LOGPROB
from minisgl.server.encoding import DONE, encode, error_body, event
from minisgl.server.jobs import GenerationJob
from minisgl.server.replies import Reply, ReplyChoice
from minisgl.server.schemas import (
    CompletionTokensDetails,
    EndReason,
    PromptLogprobs,
    PromptToken,
    PromptTokensDetails,
    Usage,
)
from minisgl.server.served_engine import ServedTokenizer

LogprobsT = TypeVar("LogprobsT", bound=Struct)
ChoiceT = TypeVar("ChoiceT", bound="ChunkedChoice[Any]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The members that all events and the whole answer of one reply have in common."""

    id: str
    created: int  # seconds since 1970
    model: str
    # The usage of a chunk that reports none: null where the client gets usage in the last chunk.
    no_usage: UnsetType | None = UNSET
    fingerprint: str | UnsetType = UNSET


class ChunkedChoice(ReplyChoice, Generic[LogprobsT]):
    """One choice of a reply in chunks. A subclass has the schema of an endpoint."""

    # Whether logprobs cover every token, those of an echo and those without text included, or
    # exactly the tokens that the generated text consists of.
    scores_all: ClassVar[bool]

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: ServedTokenizer | None,
        envelope: Envelope,
        *,
        continuous_usage: bool = False,
    ) -> None:
        """`continuous_usage`: each chunk has the usage of this choice so far."""
        super().__init__(job)
        self._tokenizer = tokenizer
        self._envelope = envelope
        self._continuous_usage = continuous_usage
        self._scored = job.params.logprobs is not None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._alignment: Alignment | None = None
        self._plain = not (continuous_usage or self._scored or job.return_token_ids)
        # Nothing but null follows the text, so its empty string is the last one in the event.
        self._head, _, self._tail = event(self._chunk("")).rpartition(b'""')

    def events(self, delta: OutputDelta) -> bytes:
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_host_tokens = delta.num_host_tokens
        self.num_disk_tokens = delta.num_disk_tokens
        events = b"" if self._started else self._opening()
        text = self._take(delta)
        if not self._plain:
            events += self._full_event(text, delta)
        elif text:
            events += self._head + encode(text) + self._tail
        if self._finish_reason is not None:
            events += event(self._last_chunk(self._finish_reason))
        return events

    def keep(self, delta: OutputDelta) -> None:
        self._texts.append(self._take(delta))
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs

    @property
    def num_scored(self) -> int:
        return len(self._logprobs) + len(self._prompt_logprobs)

    @abstractmethod
    def whole(self) -> Struct:
        """The choice in an answer that is not streamed."""

    @property
    def usage(self) -> Usage:
        """The usage of this choice so far."""
        num_prompt = len(self.job.prompt_token_ids)
        return usage_of(
            num_prompt,
            self.num_cached_tokens,
            self.num_output_tokens,
            self.num_reasoning_tokens,
            self.num_host_tokens,
            self.num_disk_tokens,
        )

    @property
    def prompt_token_ids(self) -> list[int] | UnsetType:
        """The prompt as the answer reports it."""
        return [*self.job.prompt_token_ids] if self.job.return_token_ids else UNSET

    @property
    def prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        """The logprobs of the prompt as a whole answer reports them."""
        if self.job.prompt_logprobs is None:
            return UNSET
        return [None, *map(self._prompt_token, self._prompt_logprobs)]

    # -- parts of a whole answer -------------------------------------------------------------------

    def _whole_text(self) -> str:
        return "".join(self._texts)

    def _whole_logprobs(self, text: str) -> LogprobsT | None:
        if not self._scored:
            return None
        return self._show(self._place(text, self._logprobs, self._prompt_logprobs))

    def _whole_token_ids(self) -> list[int] | UnsetType:
        return self._token_ids if self.job.return_token_ids else UNSET

    # -- parts of a chunk --------------------------------------------------------------------------

    def _chunk_usage(self) -> Usage | UnsetType | None:
        return self.usage if self._continuous_usage else self._envelope.no_usage

    def _chunk_token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return [*token_ids] if self.job.return_token_ids else UNSET

    @abstractmethod
    def _opening(self) -> bytes:
        """The event before all others, if there is one."""

    @abstractmethod
    def _chunk(
        self, text: str, logprobs: LogprobsT | None = None, token_ids: Sequence[int] = ()
    ) -> Struct:
        """The chunk that adds `text`."""

    @abstractmethod
    def _last_chunk(self, finish_reason: EndReason) -> Struct:
        """The chunk that ends the choice and adds nothing."""

    @abstractmethod
    def _show(self, placed: Sequence[PlacedToken]) -> LogprobsT:
        """Logprobs as clients get them."""

    # -- the rest ----------------------------------------------------------------------------------

    def _full_event(self, text: str, delta: OutputDelta) -> bytes:
        placed = self._place(text, delta.logprobs, delta.prompt_logprobs) if self._scored else None
        token_ids = delta.token_ids if self.job.return_token_ids else []
        if not (text or placed or token_ids):
            return b""
        return event(self._chunk(text, self._show(placed) if placed else None, token_ids))

    def _place(
        self, text: str, logprobs: Sequence[TokenLogprobs], prompt_logprobs: Sequence[TokenLogprobs]
    ) -> list[PlacedToken]:
        """The tokens to report with `text`, the first time with those of the echo."""
        job, tokenizer = self.job, self._tokenizer
        placed: list[PlacedToken] = []
        skip = job.params.skip_special_tokens
        table = tokenizer.byte_table(skip_special_tokens=skip) if tokenizer else {}
        if self._alignment is None:
            echo = job.echo or ""
            text = text[len(echo) :]
            if self.scores_all and job.echo is not None:
                # The first token of a prompt follows nothing, so it has no probability.
                scored = [None, *prompt_logprobs]
                placed = place_prompt(tokenizer, job.prompt_token_ids, scored, echo)
            self._alignment = Alignment(
                start=len(echo),
                # As in decoding: a space is dropped only at the beginning of the text.
                drops_first_space=tokenizer is not None
                and tokenizer.drops_first_space
                and not any(table[token_id] for token_id in job.prompt_token_ids),
            )
        num_tokens = len(logprobs) - self._token_ended
        for place, token in enumerate(logprobs):
            has_text = place < num_tokens and tokenizer is not None
            self._alignment.add(token, table[token.token_id] if has_text else b"")
        placed += self._alignment.show(text, finished=self._finish_reason is not None)
        return placed if self.scores_all else [token for token in placed if token.data]

    def _prompt_token(self, scored: TokenLogprobs) -> dict[str, PromptToken]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(scored.top, 1)}
        found = {scored.token_id: scored.logprob} | dict(scored.top[: self.job.prompt_logprobs])
        return {
            str(token_id): PromptToken(
                logprob=max(logprob, LOWEST_LOGPROB),
                rank=ranks.get(token_id),
                decoded_token=self._token_text(token_id),
            )
            for token_id, logprob in found.items()
        }

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"

    def _token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""


class ChunkedReply(Reply, Generic[ChoiceT]):
    """The answer to one HTTP request, in chunks. A subclass has the schema of an endpoint."""

    id_prefix: ClassVar[str]
    choice_type: type[ChoiceT]

    def __init__(
        self,
        jobs: Sequence[GenerationJob],
        *,
        model: str,
        tokenizer: ServedTokenizer | None,
        include_usage: bool,
        continuous_usage: bool = False,
        id: str | None = None,
        fingerprint: str | UnsetType = UNSET,
    ) -> None:
        """`id` must differ from that of every other reply; a random one if None."""
        super().__init__(f"{self.id_prefix}-{id or uuid.uuid4().hex}")
        self._include_usage = include_usage
        self._envelope = Envelope(
            id=self.id,
            created=int(time.time()),
            model=model,
            no_usage=None if include_usage else UNSET,
            fingerprint=fingerprint,
        )
        self.choices: Sequence[ChoiceT] = [
            self.choice_type(job, tokenizer, self._envelope, continuous_usage=continuous_usage)
            for job in jobs
        ]

    def whole(self) -> bytes:
        return encode(self._whole())

    def last_events(self) -> bytes:
        return (event(self._usage_chunk()) if self._include_usage else b"") + DONE

    def failure_events(self, error: Exception) -> bytes:
        return event(error_body(error)) + DONE

    @abstractmethod
    def _whole(self) -> Struct: ...

    @abstractmethod
    def _usage_chunk(self) -> Struct:
        """The last chunk, which has the usage of all choices."""

    def _usage(self) -> Usage:
        """The usage of all choices. A prompt counts once, however many choices it has."""
        choices = self.choices
        firsts = {each.job.index - each.job.k: each for each in reversed(choices)}.values()
        return usage_of(
            sum(len(choice.job.prompt_token_ids) for choice in firsts),
            sum(choice.num_cached_tokens for choice in firsts),
            sum(choice.num_output_tokens for choice in choices),
            sum(choice.num_reasoning_tokens for choice in choices),
            sum(choice.num_host_tokens for choice in firsts),
            sum(choice.num_disk_tokens for choice in firsts),
        )


def usage_of(
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    num_reasoning_tokens: int,
    num_host_tokens: int,
    num_disk_tokens: int,
) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            num_cached_tokens, num_host_tokens, num_disk_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
    )
