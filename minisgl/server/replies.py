"""The bodies of answers: a reply is made of choices, each fed with the deltas of one stream.

A choice either turns each delta into events (`events`) or keeps them (`keep`) for the finished
object (`whole`). At 30,000 events a second only the text of an event is encoded; the rest was
encoded once, when the reply was made.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from minisgl.errors import EngineStoppedError, foreseen
from minisgl.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs
from minisgl.server.service import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
MAX_ERROR_CHARS = 1000  # a message may quote what the caller sent

encode = msgspec.json.Encoder().encode


def event(payload: object) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's envelope. Of an unforeseen error only the log knows more."""
    known = foreseen(error)
    return {
        "error": {
            "message": str(known)[:MAX_ERROR_CHARS],
            "type": known.type,
            "param": known.param and known.param[:MAX_ERROR_CHARS],
            "code": known.code,
        }
    }


@dataclass(slots=True, kw_only=True)
class Job:
    """One sequence to generate: what goes to the engine and how it is reported."""

    index: int
    k: int  # which of the n choices of its prompt
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    echo: str | None = None  # the text of the prompt, to begin the answer with


class Choice(ABC):
    """One choice of a reply, while it is generated. A subclass is the shape of an endpoint."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]  # of the request
    no_content: ClassVar[bytes]  # what `_content` is in the chunk that ends the choice

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer | None,
        head: bytes,
        tail: bytes,
        *,
        continuous_usage: bool = False,
    ) -> None:
        """A chunk is `head`, this choice's own part, and `tail` or, if wanted, its usage so far."""
        self.job = job
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self._head = head + b'{"index":%d,' % job.index
        self._tail = tail
        self._continuous_usage = continuous_usage
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + tail
        self._started = False
        self._finish_reason: str | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs | None] = []

    def events(self, delta: OutputDelta) -> bytes:
        """The events that tell a client of `delta`; none while its text is held back."""
        self.num_cached_tokens = delta.num_cached_tokens
        events = b"" if self._started else self._opening()
        text, logprobs = self._take(delta)
        if logprobs:
            events += self._event(self._content(text), encode(self._show(logprobs)))
        elif text and self._continuous_usage:
            events += self._event(self._content(text))
        elif text:
            events += self._head + self._content(text) + self._plain_tail
        if self._finish_reason is not None:
            events += self._event(self.no_content, finish_reason=encode(self._finish_reason))
        return events

    def keep(self, delta: OutputDelta) -> None:
        text, logprobs = self._take(delta)
        self._texts.append(text)
        self._logprobs += logprobs

    @property
    def num_scored(self) -> int:
        """Tokens kept with their logprobs."""
        return len(self._logprobs)

    def whole(self) -> dict[str, Any]:
        wanted = self.job.params.logprobs is not None
        return {
            "index": self.job.index,
            **self._whole_content("".join(self._texts)),
            "logprobs": self._show(self._logprobs) if wanted else None,
            "finish_reason": self._finish_reason,
        }

    def check_finished(self) -> None:
        """Called when the stream has ended; raises EngineStoppedError if that came too early."""
        if self._finish_reason is None:
            raise EngineStoppedError("The request was stopped before it had finished.")

    def _take(self, delta: OutputDelta) -> tuple[str, list[TokenLogprobs | None]]:
        """The text and the logprobs that `delta` adds to the answer."""
        self.num_output_tokens = delta.num_output_tokens
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish_reason = delta.finish_reason.value
        text = delta.text
        logprobs: list[TokenLogprobs | None] = [*delta.logprobs]
        if self.job.echo is not None and not self._started:
            text = self.job.echo + text
            if self.job.params.logprobs is not None:
                # The first token of a prompt follows nothing, so it has no probability.
                logprobs = [None, *delta.prompt_logprobs, *logprobs]
        self._started = True
        return text, logprobs

    def _event(
        self, content: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null"
    ) -> bytes:
        own = b'%s,"logprobs":%s,"finish_reason":%s}' % (content, logprobs, finish_reason)
        if self._continuous_usage:
            return self._head + own + b'],"usage":' + encode(usage([self])) + b"}\n\n"
        return self._head + own + self._tail

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"

    def _opening(self) -> bytes:
        """The event before all others."""
        return b""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """The member of a chunk that holds `text`."""

    @abstractmethod
    def _whole_content(self, text: str) -> dict[str, Any]:
        """The same of a whole answer."""

    @abstractmethod
    def _show(self, logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Logprobs as clients get them; None stands for the first token of an echoed prompt."""


class ChatChoice(Choice):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    no_content = b'"delta":{}'

    def _opening(self) -> bytes:
        return self._event(b'"delta":{"role":"assistant","content":""}')

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}"

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _show(self, logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        content = [
            self._token(scored.token_id, scored.logprob)
            | {"top_logprobs": [self._token(*rival) for rival in scored.top]}
            for scored in logprobs
            if scored is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None,
        }


class CompletionChoice(Choice):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    no_content = b'"text":""'

    _offset = 0  # in characters of token texts, of the next token to show

    def _content(self, text: str) -> bytes:
        return b'"text":' + encode(text)

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _show(self, logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        first = self.job.prompt_token_ids[0]
        tokens = [self._token_text(scored.token_id if scored else first) for scored in logprobs]
        *offsets, self._offset = accumulate(map(len, tokens), initial=self._offset)
        return {
            "tokens": tokens,
            "token_logprobs": [
                scored and max(scored.logprob, LOWEST_LOGPROB) for scored in logprobs
            ],
            "top_logprobs": [scored and self._rivals(scored) for scored in logprobs],
            "text_offset": offsets,
        }

    def _rivals(self, scored: TokenLogprobs) -> dict[str, float]:
        # The token itself belongs to them, even where it is not among the likeliest.
        found = dict(scored.top) | {scored.token_id: scored.logprob}
        return {self._token_text(id): max(logprob, LOWEST_LOGPROB) for id, logprob in found.items()}


class Reply:
    """The answer to one HTTP request."""

    def __init__(
        self,
        kind: type[Choice],
        jobs: Sequence[Job],
        *,
        model: str,
        tokenizer: Tokenizer | None,
        include_usage: bool,
        continuous_usage: bool = False,
        id: str | None = None,
    ) -> None:
        """`id` must be one that no other reply has; its own if None."""
        self.id = f"{kind.id_prefix}-{id or uuid.uuid4().hex}"
        self.kind = kind
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        head = event(self._envelope(kind.chunk_object)).removesuffix(b"}\n\n") + b',"choices":['
        # Clients that ask for the usage find it in the last event and null in all others.
        tail = b"]%s}\n\n" % (b',"usage":null' if include_usage else b"")
        self.choices = [
            kind(job, tokenizer, head, tail, continuous_usage=continuous_usage) for job in jobs
        ]

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [choice.whole() for choice in self.choices]
        envelope = self._envelope(self.kind.whole_object)
        return encode(envelope | {"choices": choices, "usage": usage(self.choices)})

    def last_events(self) -> bytes:
        if not self._include_usage:
            return DONE
        envelope = self._envelope(self.kind.chunk_object)
        return event(envelope | {"choices": [], "usage": usage(self.choices)}) + DONE

    def _envelope(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self._created, "model": self._model}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """What the choices took so far. A prompt counts once, however many choices it has."""
    firsts = {choice.job.index - choice.job.k: choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.job.prompt_token_ids) for choice in firsts)
    num_cached = sum(choice.num_cached_tokens for choice in firsts)
    num_output = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        # What a model thinks is part of its answer here.
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
