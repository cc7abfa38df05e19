"""An answer as a list of blocks: runs of reasoning and of text, and calls.

The Responses API calls them items, the Messages API content blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from minisgl.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from minisgl.request import FinishReason, OutputDelta
from minisgl.server.answers.alignment import PlacedToken
from minisgl.server.answers.content_scores import ContentScores
from minisgl.server.answers.jobs import GenerationJob
from minisgl.server.answers.reply import AnswerReader, Call, EndReason, ReplyChoice
from minisgl.text.parsing.emitter import GAP
from minisgl.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer, as far as it has come. `texts` are the arguments of a call."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    texts: list[str]
    call: Call | None = None
    cut: bool = False  # the answer ended inside of it
    scored: list[PlacedToken] = field(default_factory=list)  # of a text, if requested

    @property
    def text(self) -> str:
        """What it consists of; of a custom tool's call the input."""
        return self.call.input if self.call and self.call.custom else "".join(self.texts)


@dataclass(frozen=True, slots=True)
class BlockStart:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockText:
    """Goes on with a block. The input of a custom tool comes in one piece."""

    block: Block
    text: str
    scored: Sequence[PlacedToken] = ()


@dataclass(frozen=True, slots=True)
class BlockEnd:
    block: Block


# What goes on with an open block, by its kind. Calls take more than a text.
RUNS: Mapping[str, type[ContentText | ReasoningText] | None] = {
    "text": ContentText,
    "reasoning": ReasoningText,
    "call": None,
}
BlockEvent: TypeAlias = BlockStart | BlockText | BlockEnd


class BlockChoice(ReplyChoice):
    """An answer in blocks. A subclass has the schema of an endpoint."""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: for logprobs, if the job asks for them."""
        super().__init__(job)
        self._scores: ContentScores | None = None
        if job.params.logprobs is not None and tokenizer is not None:
            self._scores = ContentScores(job, tokenizer)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._reader = AnswerReader(job.style)

    def events(self, delta: OutputDelta) -> bytes:
        if text := self._more_of_open(delta):  # the frequent case
            assert self._open is not None
            return self._more(self._open, text)
        parts = [] if self._started else [self._opening(delta)]
        parts += map(self._event, self._read(delta))
        return b"".join(parts)

    def keep(self, delta: OutputDelta) -> None:
        for _ in self._read(delta):
            pass

    @property
    def num_scored(self) -> int:
        return sum(len(block.scored) for block in self.blocks)

    def cut_open(self) -> None:
        """Say of the open block that nothing follows in it."""
        if self._open is not None:
            self._open.cut = True
            self._open = None

    def check_finished(self) -> EndReason:
        reason = super().check_finished()
        return "length" if self._reader.has_broken_call else reason

    def _opening(self, delta: OutputDelta) -> bytes:
        """The events before those of the blocks; `delta` is the first one."""
        return b""

    @abstractmethod
    def _event(self, found: BlockEvent) -> bytes:
        """The events that report `found`."""

    def _more(self, block: Block, text: str) -> bytes:
        """The event that goes on with a block, without logprobs: the frequent one."""
        return self._event(BlockText(block, text))

    def _more_of_open(self, delta: OutputDelta) -> str:
        """Take a delta that does nothing but go on with the open run; "" for any other, untaken."""
        block = self._open
        if block is None or delta.finish_reason is not None or self._scores is not None:
            return ""
        if self.job.style is None:
            text = delta.text
        elif len(delta.events) == 1 and type(event := delta.events[0]) is RUNS[block.kind]:
            text = event.text
        else:
            return ""
        if text:
            self._take(delta)
            block.texts.append(text)
        return text

    def _read(self, delta: OutputDelta) -> Iterator[BlockEvent]:
        self._take(delta)
        cut = delta.finish_reason is FinishReason.LENGTH
        scores = self._scores
        if scores is not None:
            scores.add(delta, token_ended=self._token_ended)
        for found in self._reader.read(delta):
            scored = scores.read(found) if scores is not None else ()
            if scored and not isinstance(found, ContentText):
                self._score_open(scored)  # a token that is not of the text alone
            match found:
                case ContentText(text):
                    yield from self._go_on("text", text, scored)
                case ReasoningText(text):
                    yield from self._go_on("reasoning", text)
                case CallStart(index):
                    yield from self._end_open()
                    call = self._reader.calls[index]
                    yield BlockStart(self._begin("call", call.arguments, call))
                case CallArguments(text=text):
                    block = self._open
                    assert block is not None and block.call is not None
                    if not block.call.custom:
                        yield BlockText(block, text)
                case CallEnd(is_object=is_object):
                    yield from self._end_open(cut=not is_object)
        if self._finish_reason is None:
            return
        if scores is not None:
            self._score_open(scores.finish())
        yield from self._end_open(cut=cut)
        only_thought = all(block.kind == "reasoning" for block in self.blocks)
        if only_thought and not (cut and self.blocks):
            # Clients look for a text, or a call, in every answer that has ended by itself.
            yield BlockStart(self._begin("text", []))
            yield from self._end_open(cut=cut)

    def _go_on(
        self,
        kind: Literal["reasoning", "text"],
        text: str,
        scored: Sequence[PlacedToken] = (),
    ) -> Iterator[BlockEvent]:
        block = self._open
        if block is None or block.kind != kind:
            yield from self._end_open()
            if any(block.kind == kind for block in self.blocks):
                text = text.removeprefix(GAP)  # between blocks there is nothing
            block = self._begin(kind, [])
            yield BlockStart(block)
        block.texts.append(text)
        block.scored += scored
        yield BlockText(block, text, scored)

    def _score_open(self, scored: Sequence[PlacedToken]) -> None:
        if self._open is not None and self._open.kind == "text":
            self._open.scored += scored

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], texts: list[str], call: Call | None = None
    ) -> Block:
        self._open = Block(len(self.blocks), kind, texts, call)
        self.blocks.append(self._open)
        return self._open

    def _end_open(self, *, cut: bool = False) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is None:
            return
        block.cut = cut
        if block.call is not None and block.call.custom:
            yield BlockText(block, block.text)
        yield BlockEnd(block)
