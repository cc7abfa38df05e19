"""Answers to POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.content_scores import scored_token
from minisgl.server.answers.reply import EndReason
from minisgl.server.apis.openai.answer_types import (
    AnswerMessage,
    ChatAnswerChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
)
from minisgl.server.apis.openai.chunked_reply import ChunkedChoice, ChunkedReply, Kind
from minisgl.server.http.encoding import event

CHUNK = Kind(ChatCompletionChunk, "chat.completion.chunk")


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
        return self._envelope.around(
            CHUNK, [choice], self._chunk_usage(), prompt_token_ids=prompt_token_ids
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
    whole_kind = Kind(ChatCompletion, "chat.completion")
    chunk_kind = CHUNK

    def _whole_members(self) -> dict[str, Any]:
        first = self.choices[0]
        return {
            "prompt_token_ids": first.prompt_token_ids,
            "prompt_logprobs": first.prompt_logprobs,
        }
