"""The detokenizer of an answer that is parsed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minisgl.events import ContentText, Event
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.parsing.emitter import GAP, GAP_TEXT
from minisgl.text.tokenizer import Tokenizer


class ParsingDetokenizer(Detokenizer):
    """Hands each token to a parser. The text is the content, and the events are the whole answer.

    Stop strings match only content that the model has written, and no match goes across reasoning,
    a call or the end of a message.
    """

    __slots__ = ("_events", "_gap", "_parser")

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser, **options: Any) -> None:
        """options: those of a Detokenizer."""
        super().__init__(tokenizer, **options)
        self._parser = parser
        self._events: list[Event] = []
        self._gap = ""  # what comes before the next text that no stop string holds back

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def push(self, token_id: int) -> str:
        if self.stopped is not None:
            return ""
        if self._stops is not None:
            self._stops.count_token()
        if token_id in self._parser.marker_ids:
            text = self._decode(b"", True)  # a character that the marker breaks off
        else:
            text = self._text_of(token_id)
        return self._keep(self._parser.feed([(token_id, text)]))

    def flush(self, *, natural: bool = True) -> str:
        if self.stopped is not None:
            return ""
        rest = self._decode(b"", True)
        return self._keep(self._parser.finish(natural, rest)) + self._release()

    def _keep(self, events: Iterable[Event]) -> str:
        """Keep events up to a stop string; returns the content in them."""
        content = ""
        for event in events:
            if not isinstance(event, ContentText):
                content += self._release()
                self._events.append(event)
            elif event is GAP_TEXT and self._stops is not None:
                content += self._release()
                self._gap = GAP
            elif self._stops is None:
                content += event.text
                self._events.append(event)
            else:
                content += self._put(self._stops.match(event.text))
                self.stopped = self._stops.found
                if self.stopped is not None:
                    break
        return content

    def _release(self) -> str:
        """Give up what might have become a stop string."""
        return self._put(self._stops.release()) if self._stops else ""

    def _put(self, text: str) -> str:
        if text:
            text, self._gap = self._gap + text, ""
            self._events.append(ContentText(text))
        return text
