"""Answers to POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from minisgl.server.alignment import PlacedToken
from minisgl.server.chunked_replies import ChunkedChoice, ChunkedReply
from minisgl.server.content_scores import scored_token
from minisgl.server.encoding import event
from minisgl.server.schemas import (
    AnswerMessage,
    ChatAnswerChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
    EndReason,
)


class ChatChoice(ChunkedChoice[ChatLogprobs]):
    """A message of the assistant."""

    scores_all = False

    def whole(self) -> ChatAnswerChoice:
        text = self._whole_text()
        return ChatAnswerChoice(
            index=self.job.index,
            message=AnswerMessage(role="assistant", content=text, refusal=None),
            logprobs=self._whole_logprobs(text),
            finish_reason=self.check_finished(),
            token_ids=self._whole_token_ids(),
        )

    def _opening(self) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        return event(self._chunk_of(delta, prompt_token_ids=self.prompt_token_ids))

    def _chunk(
        self, text: str, logprobs: ChatLogprobs | None = None, token_ids: Sequence[int] = ()
    ) -> ChatCompletionChunk:
        return self._chunk_of(ChatDelta(content=text), logprobs, token_ids=token_ids)

    def _last_chunk(self, finish_reason: EndReason) -> ChatCompletionChunk:
        return self._chunk_of(ChatDelta(), finish_reason=finish_reason)

    def _chunk_of(
        self,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: ChatEndReason | None = None,
        *,
        token_ids: Sequence[int] = (),
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            index=self.job.index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=self._chunk_token_ids(token_ids),
        )
        return ChatCompletionChunk(
            id=self._envelope.id,
            object="chat.completion.chunk",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[choice],
            usage=self._chunk_usage(),
            system_fingerprint=self._envelope.fingerprint,
            prompt_token_ids=prompt_token_ids,
        )

    def _show(self, placed: Sequence[PlacedToken]) -> ChatLogprobs:
        as_id = self.job.tokens_as_ids
        content = [scored_token(token, self._tokenizer, as_id=as_id) for token in placed]
        return ChatLogprobs(content=content, refusal=None)


class ChatReply(ChunkedReply[ChatChoice]):
    """The answer to a conversation, whose prompt all choices share."""

    id_prefix = "chatcmpl"
    prompt_field = "messages"
    choice_type = ChatChoice

    def _whole(self) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[choice.whole() for choice in self.choices],
            usage=self._usage(),
            system_fingerprint=self._envelope.fingerprint,
            prompt_token_ids=self.choices[0].prompt_token_ids,
            prompt_logprobs=self.choices[0].prompt_logprobs,
        )

    def _usage_chunk(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[],
            usage=self._usage(),
            system_fingerprint=self._envelope.fingerprint,
        )
