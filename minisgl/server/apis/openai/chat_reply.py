"""Answers to POST /v1/chat/completions, parsed or not: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from minisgl.request import OutputDelta
from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.content_scores import ContentScores, scored_token
from minisgl.server.answers.reply import AnswerReader, Call
from minisgl.server.apis.openai import answer_types as answers
from minisgl.server.apis.openai.chunked_reply import ChunkedChoice, ChunkedReply
from minisgl.server.http.encoding import encode, event


class ChatChoice(ChunkedChoice):
    """A message of the assistant, which may have reasoning and calls if it is parsed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        style = self.job.style
        self._reader = AnswerReader(style)
        self._is_text = self._plain and style is None
        self._reasoning_fields = style.reasoning_fields if style is not None else ()
        self._reasoning: list[str] = []
        self._placed: list[PlacedToken] = []  # tokens of the content that are not yet reported
        self._scores: ContentScores | None = None
        if style is not None and self._scored and self._tokenizer is not None:
            self._scores = ContentScores(self.job, self._tokenizer)
        # The frequent events are encoded once, and cut where their text is.
        self._reasoning_head = self._reasoning_tail = b""
        if len(self._reasoning_fields) == 1:
            empty = self._chunk_of(self._thought(""))
            self._reasoning_head, _, self._reasoning_tail = event(empty).rpartition(b'""')

    def events(self, delta: OutputDelta) -> bytes:
        if self._is_text and self._started and delta.finish_reason is None:  # the frequent case
            return self._head + encode(text) + self._tail if (text := self._take(delta)) else b""
        parts = [self._begin(delta)]
        token_ids: Sequence[int] = delta.token_ids if self.job.return_token_ids else ()
        for found in self._parse(delta):
            parts.append(self._event_of(found, token_ids))
            if parts[-1]:
                token_ids = ()
        if token_ids or (self._placed and self._finish_reason is not None):
            none = "" if self.job.style is None else UNSET
            parts.append(event(self._chunk(none, self._shown(), token_ids=token_ids)))
        if self._finish_reason is not None:
            parts.append(event(self._chunk(UNSET, finish_reason=self._end_reason())))
        return b"".join(parts)

    def keep(self, delta: OutputDelta) -> None:
        for found in self._parse(delta):
            match found:
                case ContentText(text):
                    self._texts.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
        self._token_ids += delta.token_ids
        self._prompt_logprobs += delta.prompt_logprobs

    def whole(self) -> answers.ChatAnswerChoice:
        content = "".join(self._texts)
        message = answers.AnswerMessage(
            role="assistant",
            content=None if self._reader.calls and not content else content,
            refusal=None,
            tool_calls=[*map(_whole_call, self._reader.calls)] or UNSET,
        )
        for name in self._reasoning_fields:
            setattr(message, name, "".join(self._reasoning) or None)
        return answers.ChatAnswerChoice(
            index=self.job.index,
            message=message,
            logprobs=self._show(self._placed) if self._scored else None,
            finish_reason=self._end_reason(),
            token_ids=self._reported(self._token_ids),
            matched_stop=self.matched_stop,
            routed_experts=self.last.routed_experts or UNSET,
            weight_versions=self.weight_versions,
        )

    @property
    def num_scored(self) -> int:
        return len(self._placed) + len(self._prompt_logprobs)

    def _end_reason(self) -> answers.ChatEndReason:
        """Calls are complete only where the model has ended the answer by itself, and each well."""
        reason = self.check_finished()
        if reason == "stop" and self._reader.has_broken_call:
            return "length"
        return "tool_calls" if reason == "stop" and self._reader.calls else reason

    def _parse(self, delta: OutputDelta) -> Sequence[Event]:
        """The events of `delta`, in order, the first time with those of the echo."""
        text = self._take(delta)
        if self.job.style is None:
            placed = self._place(text, delta.logprobs)
            self._placed += [token for token in placed if token.data]
            return [ContentText(text)] if text else []
        if self._scores is not None:
            self._scores.add(delta, token_ended=self._token_ended)
            for each in delta.events:  # an echo has no tokens
                self._placed += self._scores.read(each)
            if self._finish_reason is not None:
                self._placed += self._scores.finish()
        return self._reader.read(delta)

    def _opening(self) -> bytes:
        delta = answers.ChatDelta(role="assistant", content="")
        return event(self._chunk_of(delta, prompt_token_ids=self.prompt_token_ids))

    def _chunk(
        self,
        text: str | UnsetType,
        logprobs: answers.ChatLogprobs | None = None,
        finish_reason: answers.ChatEndReason | None = None,
        *,
        token_ids: Sequence[int] = (),
    ) -> answers.ChatCompletionChunk:
        delta = answers.ChatDelta(content=text)
        return self._chunk_of(delta, logprobs, finish_reason, token_ids=token_ids)

    def _chunk_of(
        self,
        delta: answers.ChatDelta,
        logprobs: answers.ChatLogprobs | None = None,
        finish_reason: answers.ChatEndReason | None = None,
        *,
        token_ids: Sequence[int] = (),
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> answers.ChatCompletionChunk:
        choice = answers.ChatChunkChoice(
            index=self.job.index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            matched_stop=UNSET if finish_reason is None else self.matched_stop,
            token_ids=self._reported(token_ids),
            weight_versions=UNSET if finish_reason is None else self.weight_versions,
        )
        return self._envelope.around(
            answers.ChatCompletionChunk,
            [choice],
            self._chunk_usage(),
            prompt_token_ids=prompt_token_ids,
        )

    def _show(self, placed: Sequence[PlacedToken]) -> answers.ChatLogprobs:
        as_id = self.job.tokens_as_ids
        content = [scored_token(token, self._tokenizer, as_id=as_id) for token in placed]
        return answers.ChatLogprobs(content=content, refusal=None)

    # -- events ------------------------------------------------------------------------------------

    def _event_of(self, found: Event, token_ids: Sequence[int]) -> bytes:
        match found:
            case ContentText(text):
                if self._plain:
                    return self._head + encode(text) + self._tail
                return event(self._chunk(text, self._shown(), token_ids=token_ids))
            case ReasoningText(text):
                if not self._reasoning_fields:
                    return b""
                if self._plain and self._reasoning_head:
                    return self._reasoning_head + encode(text) + self._reasoning_tail
                delta = self._thought(text)
            case CallStart(index):
                delta = self._start_of(index)
            case CallArguments(index, text):
                if self._reader.calls[index].custom:
                    return b""
                function = answers.FunctionDelta(arguments=text)
                call = answers.CallDelta(index=index, function=function)
                delta = answers.ChatDelta(tool_calls=[call])
            case CallEnd(index):
                if not self._reader.calls[index].custom:
                    return b""
                input = answers.CustomCallInput(input=self._reader.calls[index].input)
                delta = answers.ChatDelta(tool_calls=[answers.CallDelta(index=index, custom=input)])
        return event(self._chunk_of(delta, token_ids=token_ids))

    def _thought(self, text: str) -> answers.ChatDelta:
        delta = answers.ChatDelta()
        for name in self._reasoning_fields:
            setattr(delta, name, text)
        return delta

    def _start_of(self, index: int) -> answers.ChatDelta:
        call = self._reader.calls[index]
        if call.custom:
            custom = answers.CustomCallInput(call.name, "")
            begun = answers.CallDelta(index=index, id=call.id, type="custom", custom=custom)
        else:
            function = answers.FunctionDelta(name=call.name, arguments="")
            begun = answers.CallDelta(index=index, id=call.id, type="function", function=function)
        return answers.ChatDelta(tool_calls=[begun])

    # -- logprobs ----------------------------------------------------------------------------------

    def _shown(self) -> Any:
        """The logprobs of the tokens of content that have become complete."""
        placed, self._placed = self._placed, []
        return self._show(placed) if placed else None


def _whole_call(call: Call) -> answers.FunctionCall | answers.CustomCall:
    if call.custom:
        return answers.CustomCall(id=call.id, custom=answers.CustomCallInput(call.name, call.input))
    return answers.FunctionCall(id=call.id, function=answers.NamedArguments(call.name, call.text))


class ChatReply(ChunkedReply):
    """The answer to a conversation, whose prompt all choices share."""

    id_prefix = "chatcmpl"
    prompt_field = "messages"
    choice_type = ChatChoice
    whole_type, chunk_type = answers.ChatCompletion, answers.ChatCompletionChunk

    def _whole_members(self) -> dict[str, Any]:
        first = self.choices[0]
        return {
            "prompt_token_ids": first.prompt_token_ids,
            "prompt_logprobs": first.prompt_logprobs,
        }
