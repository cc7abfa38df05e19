"""Answers to POST /v1/messages."""

from __future__ import annotations

from msgspec import Raw

from minisgl.request import FinishReason, OutputDelta
from minisgl.server.answers.blocks import Block, BlockChoice, BlockEvent, BlockStart, BlockText
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.reply import Reply
from minisgl.server.apis.messages import answer_types as answers
from minisgl.server.apis.messages.object_text import ObjectText, is_object
from minisgl.server.apis.messages.request_types import MessagesRequest
from minisgl.server.http.encoding import encode, typed_event
from minisgl.server.http.error_bodies import messages_error_body

# Clients send it back with the thinking, and may not do without. It proves nothing here.
SIGNATURE = "minisgl"
RAW_INPUT = "_raw"  # the member of an input that has what the model wrote, if that is no object
NO_INPUT = Raw(b"{}")


class MessageChoice(BlockChoice):
    """A message of the assistant. Blocks that are not reported do not count in their `index`."""

    def __init__(self, job: GenerationJob, body: MessagesRequest, model: str, id: str) -> None:
        super().__init__(job)
        self._id = id
        self._model = model
        self._max_tokens = body.max_tokens  # the answer may have less room
        self._thinking = body.shown_thinking
        self._stop_text: str | None = None  # the stop sequence that was found
        self._num_shown = 0
        # The frequent event is encoded once for each block, and cut where its text is. Without a
        # head the text of the block is not reported.
        self._head = self._tail = b""
        self._input = ObjectText()  # of the open call

    def events(self, delta: OutputDelta) -> bytes:
        events = super().events(delta)
        if self._finish_reason is None:
            return events
        if not self._num_shown:  # all of it is hidden thinking, and clients look at content[0]
            events += self._start(answers.AnswerText("")) + self._stop()
        reason = self._stop_reason()
        end = answers.MessageEnd(reason, self._stop_sequence(reason))
        return events + typed_event(answers.MessageDelta(end, self._usage()))

    def whole(self) -> answers.MessageAnswer:
        content = [self._whole_block(block) for block in self.blocks if self._is_shown(block)]
        return self._message(content or [answers.AnswerText("")], self._stop_reason())

    def _end(self, delta: OutputDelta) -> None:
        super()._end(delta)
        if isinstance(delta.stop_reason, str):
            self._stop_text = delta.stop_reason

    def _stop_reason(self) -> answers.StopReason:
        """Calls are complete only where the model has ended the answer by itself, and each well."""
        if self.check_finished() == "length":
            most, is_cut = self._max_tokens, self.last.finish_reason is FinishReason.LENGTH
            out_of_room = is_cut and (most is None or self.last.num_output_tokens < most)
            return "model_context_window_exceeded" if out_of_room else "max_tokens"
        if calls := [block.text for block in self.blocks if block.kind == "call"]:
            return "tool_use" if all(map(is_object, calls)) else "max_tokens"
        return "end_turn" if self._stop_text is None else "stop_sequence"

    def _stop_sequence(self, reason: answers.StopReason | None) -> str | None:
        return self._stop_text if reason == "stop_sequence" else None

    def _usage(self) -> answers.MessagesUsage:
        last = self.last
        return answers.MessagesUsage(
            input_tokens=len(self.job.prompt_token_ids) - last.num_cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=last.num_cached_tokens,
            output_tokens=last.num_output_tokens,
            output_tokens_details=answers.OutputTokensDetails(last.num_reasoning_tokens),
        )

    def _message(
        self, content: list[answers.AnswerBlock], stop_reason: answers.StopReason | None
    ) -> answers.MessageAnswer:
        return answers.MessageAnswer(
            id=self._id,
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence(stop_reason),
            usage=self._usage(),
        )

    def _is_shown(self, block: Block) -> bool:
        return block.kind != "reasoning" or self._thinking != "none"

    def _whole_block(self, block: Block) -> answers.AnswerBlock:
        match block.kind:
            case "text":
                return answers.AnswerText(block.text)
            case "reasoning":
                shown = self._thinking == "shown"
                return answers.AnswerThinking(block.text if shown else "", SIGNATURE)
            case "call":
                return _tool_use(block, _input(block.text))

    # -- events ------------------------------------------------------------------------------------

    def _opening(self, delta: OutputDelta) -> bytes:
        self.last = delta
        start = answers.MessageStart(self._message([], None))
        return typed_event(start) + typed_event(answers.Ping())

    def _event(self, found: BlockEvent) -> bytes:
        if isinstance(found, BlockText):
            text = found.text
            if found.block.kind == "call":
                text = self._input.passed(text)
            return self._head + encode(text) + self._tail if self._head and text else b""
        block = found.block
        self._head = b""
        if not self._is_shown(block):
            return b""
        if isinstance(found, BlockStart):
            match block.kind:
                case "text":
                    return self._start(answers.AnswerText(""), answers.TextDelta(""))
                case "reasoning":
                    shown = self._thinking == "shown"
                    delta = answers.ThinkingDelta("") if shown else None
                    return self._start(answers.AnswerThinking("", ""), delta)
                case "call":
                    self._input = ObjectText()
                    return self._start(_tool_use(block, NO_INPUT), answers.InputJsonDelta(""))
        if block.kind == "reasoning":
            signed = answers.ContentBlockDelta(self._num_shown, answers.SignatureDelta(SIGNATURE))
            return typed_event(signed) + self._stop()
        return self._stop()

    def _start(self, empty: answers.AnswerBlock, delta: answers.BlockDelta | None = None) -> bytes:
        """delta: of the events that have the text of the block; None if it is not reported."""
        if delta is not None:
            event = typed_event(answers.ContentBlockDelta(self._num_shown, delta))
            self._head, _, self._tail = event.rpartition(b'""')
        return typed_event(answers.ContentBlockStart(self._num_shown, empty))

    def _stop(self) -> bytes:
        self._num_shown += 1
        return typed_event(answers.ContentBlockStop(self._num_shown - 1))


def _tool_use(block: Block, input: Raw) -> answers.AnswerToolUse:
    assert block.call is not None
    return answers.AnswerToolUse(block.call.id, block.call.name, input)


def _input(arguments: str) -> Raw:
    """Arguments as the object that this API has; as one with their text if they are no object."""
    if is_object(arguments):
        return Raw(arguments.encode())
    return Raw(encode({RAW_INPUT: arguments})) if arguments else NO_INPUT


class MessageReply(Reply):
    """The answer to a conversation."""

    prompt_field = "messages"

    def __init__(
        self, job: GenerationJob, body: MessagesRequest, *, model: str, id: str, request_id: str
    ) -> None:
        """`id` must differ from that of every other reply."""
        super().__init__(f"msg_{id}")
        self._choice = MessageChoice(job, body, model, self.id)
        self._request_id = request_id
        self.choices = (self._choice,)

    def whole(self) -> bytes:
        return encode(self._choice.whole())

    def last_events(self) -> bytes:
        return typed_event(answers.MessageStop())

    def failure_events(self, error: Exception) -> bytes:
        return typed_event(messages_error_body(error, self._request_id))
