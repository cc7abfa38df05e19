"""Answers to POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from minisgl.request import OutputDelta, TokenLogprobs
from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.content_scores import LOWEST_LOGPROB, named_by_id
from minisgl.server.answers.reply import EndReason
from minisgl.server.apis.openai import answer_types as answers
from minisgl.server.apis.openai.chunked_reply import ChunkedChoice, ChunkedReply
from minisgl.server.http.encoding import encode, event


class CompletionChoice(ChunkedChoice):
    """The continuation of a prompt."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._logprobs: list[TokenLogprobs] = []

    def events(self, delta: OutputDelta) -> bytes:
        events = self._begin(delta)
        text = self._take(delta)
        if not self._plain:
            placed = self._place(text, delta.logprobs, delta.prompt_logprobs)
            token_ids = delta.token_ids if self.job.return_token_ids else ()
            if text or placed or token_ids:
                logprobs = self._show(placed) if placed else None
                events += event(self._chunk(text, logprobs, token_ids=token_ids))
        elif text:
            events += self._head + encode(text) + self._tail
        if self._finish_reason is not None:
            events += event(self._chunk("", finish_reason=self._finish_reason))
        return events

    def keep(self, delta: OutputDelta) -> None:
        self._texts.append(self._take(delta))
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs

    @property
    def num_scored(self) -> int:
        return len(self._logprobs) + len(self._prompt_logprobs)

    def whole(self) -> answers.CompletionAnswerChoice:
        text, logprobs = "".join(self._texts), None
        if self._scored:
            logprobs = self._show(self._place(text, self._logprobs, self._prompt_logprobs))
        return answers.CompletionAnswerChoice(
            index=self.job.index,
            text=text,
            logprobs=logprobs,
            finish_reason=self.check_finished(),
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self._reported(self._token_ids),
            prompt_logprobs=self.prompt_logprobs,
            matched_stop=self.matched_stop,
            routed_experts=self.last.routed_experts or UNSET,
            weight_versions=self.weight_versions,
        )

    def _opening(self) -> bytes:
        if not self.job.return_token_ids:
            return b""
        return event(self._chunk("", prompt_token_ids=self.prompt_token_ids))

    def _chunk(
        self,
        text: str,
        logprobs: answers.CompletionLogprobs | None = None,
        finish_reason: EndReason | None = None,
        *,
        token_ids: Sequence[int] = (),
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> answers.CompletionChunk:
        choice = answers.CompletionChunkChoice(
            index=self.job.index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            prompt_token_ids=prompt_token_ids,
            matched_stop=UNSET if finish_reason is None else self.matched_stop,
            token_ids=self._reported(token_ids),
            weight_versions=UNSET if finish_reason is None else self.weight_versions,
        )
        return self._envelope.around(answers.CompletionChunk, [choice], self._chunk_usage())

    def _show(self, placed: Sequence[PlacedToken]) -> answers.CompletionLogprobs:
        first = self.job.prompt_token_ids[0]
        return answers.CompletionLogprobs(
            tokens=[
                self._name(token.scored.token_id if token.scored else first) for token in placed
            ],
            token_logprobs=[
                max(token.scored.logprob, LOWEST_LOGPROB) if token.scored else None
                for token in placed
            ],
            top_logprobs=[self._top(token.scored) if token.scored else None for token in placed],
            text_offset=[token.start for token in placed],
        )

    def _name(self, token_id: int) -> str:
        """The token's text; its bytes if they are no text of their own, its id if it has none."""
        if self.job.tokens_as_ids:
            return named_by_id(token_id)
        data = self._bytes_of(token_id)
        try:
            return data.decode() or named_by_id(token_id)
        except UnicodeDecodeError:
            return _spelled(data)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""

    def _top(self, scored: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, those that the request names and the token itself, under names of
        which no two are equal."""
        own = self._name(scored.token_id)
        found = dict(scored.top[: self.job.params.logprobs]) | dict(scored.named)
        found |= {scored.token_id: scored.logprob}
        named: dict[str, float] = {}
        for token_id, logprob in found.items():
            name = self._name(token_id)
            if name in named or (name == own and token_id != scored.token_id):
                # Another token has the same text.
                name = _spelled(self._bytes_of(token_id))
                if name in named:
                    name = named_by_id(token_id)
            named[name] = max(logprob, LOWEST_LOGPROB)
        return named


def _spelled(data: bytes) -> str:
    """Bytes as OpenAI writes those of a token that is no text of its own."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionReply(ChunkedReply):
    """The continuations of one or more prompts, each with its choices."""

    id_prefix = "cmpl"
    prompt_field = "prompt"
    choice_type = CompletionChoice
    whole_type, chunk_type = answers.Completion, answers.CompletionChunk
