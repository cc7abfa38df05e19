"""The detokenizer of an answer that is parsed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minisgl.events import ContentText, Event
from minisgl.text.detokenizer import Detokenizer, StopStrings
from minisgl.text.parsing.answer import AnswerParser
from minisgl.text.tokenizer import Tokenizer


class ParsingDetokenizer(Detokenizer):
    """Hands each token to a parser. The text is the content, and the events are the whole answer.

    Stop strings match content only, and no match goes across reasoning or a call.
    """

    __slots__ = ("_content_stops", "_events", "_parser")

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: AnswerParser,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        super().__init__(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._content_stops = StopStrings(stop, include_stop, min_tokens) if stop else None
        self._parser = parser
        self._events: list[Event] = []

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
        if self._content_stops is not None:
            self._content_stops.count_token()
        if token_id in self._parser.marker_ids:
            text = self._decode(b"", True)  # a character that the marker breaks off
        else:
            text = super().push(token_id)
        return self._keep(self._parser.feed([(token_id, text)]))

    def flush(self, *, natural: bool = True) -> str:
        if self.stopped is not None:
            return ""
        rest = super().flush()
        return self._keep(self._parser.finish(natural, rest)) + self._release()

    def _keep(self, events: Iterable[Event]) -> str:
        """Keep events up to a stop string; returns the content in them."""
        content = ""
        for event in events:
            if not isinstance(event, ContentText):
                content += self._release()
                self._events.append(event)
            elif self._content_stops is None:
                content += event.text
                self._events.append(event)
            else:
                content += self._put(self._content_stops.match(event.text))
                self.stopped = self._content_stops.found
                if self.stopped is not None:
                    break
        return content

    def _release(self) -> str:
        """Give up what might have become a stop string."""
        return self._put(self._content_stops.release()) if self._content_stops else ""

    def _put(self, text: str) -> str:
        if text:
            self._events.append(ContentText(text))
        return text
