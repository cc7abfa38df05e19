"""Answers in chunks, as /v1/chat/completions and /v1/completions stream them.

Everything is built from the types in `answer_types` and encoded by msgspec, except the one frequent
event: a delta of text. A server sends up to 30,000 of them a second, so each choice encodes that
event once, cuts it where its text is, and then encodes texts only.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from msgspec import UNSET, Struct, UnsetType

from minisgl.request import FinishReason, OutputDelta, TokenLogprobs
from minisgl.server.answers.alignment import Alignment, PlacedToken, place_prompt
from minisgl.server.answers.content_scores import LOWEST_LOGPROB, named_by_id
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.reply import Reply, ReplyChoice
from minisgl.server.apis.openai.answer_types import (
    CompletionTokensDetails,
    MatchedStop,
    PromptLogprobs,
    PromptToken,
    PromptTokensDetails,
    Usage,
    VersionsOfWeights,
)
from minisgl.server.http.encoding import DONE, encode, event
from minisgl.server.http.error_bodies import error_body
from minisgl.text.tokenizer import Tokenizer

StructT = TypeVar("StructT", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The members that all events and the whole answer of one reply have in common."""

    id: str
    created: int  # seconds since 1970
    model: str
    # The usage of a chunk that reports none: null where the client gets usage in the last chunk.
    no_usage: UnsetType | None = UNSET
    fingerprint: str | UnsetType = UNSET

    def around(
        self,
        kind: type[StructT],
        choices: Sequence[Struct],
        usage: Usage | UnsetType | None,
        **others: Any,
    ) -> StructT:
        """An answer or an event of this kind."""
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
            **others,
        )


class ChunkedChoice(ReplyChoice):
    """One choice of a reply in chunks. A subclass has the schema of an endpoint."""

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: Tokenizer | None,
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
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._alignment: Alignment | None = None
        self._plain = not (continuous_usage or self._scored or job.return_token_ids)
        # Nothing but null follows the text, so its empty string is the last one in the event.
        self._head, _, self._tail = event(self._chunk("")).rpartition(b'""')

    @abstractmethod
    def whole(self) -> Struct:
        """The choice in an answer that is not streamed."""

    @abstractmethod
    def _chunk(self, text: str) -> Struct:
        """The chunk that adds `text`, and nothing else."""

    @abstractmethod
    def _opening(self) -> bytes:
        """The event before all others, if there is one."""

    @property
    def prompt_token_ids(self) -> list[int] | UnsetType:
        """The prompt as the answer reports it."""
        return self._reported(self.job.prompt_token_ids)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        """The logprobs of the prompt as a whole answer reports them."""
        if self.job.prompt_logprobs is None:
            return UNSET
        return [None, *map(self._prompt_token, self._prompt_logprobs)]

    @property
    def matched_stop(self) -> MatchedStop:
        """What has ended the answer, if that is a token or a text."""
        return UNSET if self.last.stop_reason is None else self.last.stop_reason

    @property
    def weight_versions(self) -> VersionsOfWeights:
        """The versions of the weights that have answered, once a trainer has replaced them."""
        return self.last.weight_versions or UNSET

    def _begin(self, delta: OutputDelta) -> bytes:
        """The event before those of the first delta, whose usage has no output yet."""
        if self._started:
            return b""
        self.last = replace(
            delta,
            num_output_tokens=0,
            num_reasoning_tokens=0,
            num_drafted_tokens=0,
            num_accepted_tokens=0,
        )
        return self._opening()

    def _end(self, delta: OutputDelta) -> None:
        super()._end(delta)
        if delta.finish_reason is FinishReason.ABORT:  # by a trainer, who takes what there is
            self._finish_reason = "abort"

    def _chunk_usage(self) -> Usage | UnsetType | None:
        return usage_of([self]) if self._continuous_usage else self._envelope.no_usage

    def _reported(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        """Token ids as the answer, or a chunk of it, reports them."""
        return [*token_ids] if self.job.return_token_ids else UNSET

    def _place(
        self,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
    ) -> list[PlacedToken]:
        """The tokens to report with `text`, if any; the first time with those of the echo, if these
        have logprobs."""
        if not self._scored:
            return []
        job, tokenizer = self.job, self._tokenizer
        placed: list[PlacedToken] = []
        skip = job.params.skip_special_tokens
        table = tokenizer.byte_table(skip_special_tokens=skip) if tokenizer else {}
        if self._alignment is None:
            echo = job.echo or ""
            text = text[len(echo) :]
            if prompt_logprobs is not None and job.echo is not None:
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
        return placed + self._alignment.show(text, finished=self._finish_reason is not None)

    def _prompt_token(self, scored: TokenLogprobs | None) -> dict[str, PromptToken] | None:
        if scored is None:  # a row of an image
            return None
        text_of = self._tokenizer.token_text if self._tokenizer else named_by_id
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(scored.top, 1)}
        ranks[scored.token_id] = scored.rank
        found = {scored.token_id: scored.logprob} | dict(scored.top[: self.job.prompt_logprobs])
        return {
            str(token_id): PromptToken(
                logprob=max(logprob, LOWEST_LOGPROB),
                rank=ranks[token_id],
                decoded_token=text_of(token_id),
            )
            for token_id, logprob in found.items()
        }


class ChunkedReply(Reply):
    """The answer to one HTTP request, in chunks. A subclass has the schema of an endpoint."""

    id_prefix: ClassVar[str]
    choice_type: ClassVar[type[ChunkedChoice]]
    whole_type: ClassVar[type[Struct]]
    chunk_type: ClassVar[type[Struct]]

    def __init__(
        self,
        jobs: Sequence[GenerationJob],
        *,
        model: str,
        tokenizer: Tokenizer | None,
        include_usage: bool,
        continuous_usage: bool = False,
        id: str | None = None,
        fingerprint: str | UnsetType = UNSET,
        limit_field: str = "max_tokens",
    ) -> None:
        """`id` must differ from that of every other reply; a random one if None."""
        super().__init__(f"{self.id_prefix}-{id or uuid.uuid4().hex}")
        self.limit_field = limit_field
        self._include_usage = include_usage
        self._envelope = Envelope(
            id=self.id,
            created=int(time.time()),
            model=model,
            no_usage=None if include_usage else UNSET,
            fingerprint=fingerprint,
        )
        self.choices: Sequence[ChunkedChoice] = [
            self.choice_type(job, tokenizer, self._envelope, continuous_usage=continuous_usage)
            for job in jobs
        ]

    def whole(self) -> bytes:
        choices = [choice.whole() for choice in self.choices]
        usage, others = usage_of(self.choices), self._whole_members()
        return encode(self._envelope.around(self.whole_type, choices, usage, **others))

    def last_events(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._envelope.around(self.chunk_type, [], usage_of(self.choices))) + DONE

    def failure_events(self, error: Exception) -> bytes:
        return event(error_body(error)) + DONE

    def _whole_members(self) -> dict[str, Any]:
        """The members of a whole answer that are not in its choices or its envelope."""
        return {}


def usage_of(choices: Sequence[ChunkedChoice]) -> Usage:
    """The usage of `choices`. A prompt counts once, however many choices it has."""
    firsts = {each.job.index - each.job.k: each for each in reversed(choices)}.values()
    num_prompt = sum(len(choice.job.prompt_token_ids) for choice in firsts)
    num_output = sum(choice.last.num_output_tokens for choice in choices)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(
            sum(choice.last.num_cached_tokens for choice in firsts),
            sum(choice.last.num_host_tokens for choice in firsts),
            sum(choice.last.num_disk_tokens for choice in firsts),
        ),
        completion_tokens_details=_completion_details([choice.last for choice in choices]),
    )


def _completion_details(lasts: Sequence[OutputDelta]) -> CompletionTokensDetails:
    details = CompletionTokensDetails(sum(last.num_reasoning_tokens for last in lasts))
    if num_drafted := sum(last.num_drafted_tokens for last in lasts):
        num_accepted = sum(last.num_accepted_tokens for last in lasts)
        details.accepted_prediction_tokens = num_accepted
        details.rejected_prediction_tokens = num_drafted - num_accepted
    return details
