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
from typing import Any, ClassVar

import msgspec

from minisgl.errors import EngineStoppedError, foreseen
from minisgl.request import (
    FinishReason,
    OutputDelta,
    TokenLogprobs,
)
from minisgl.server.alignment import Alignment, PlacedToken, place_prompt
from minisgl.server.jobs import GenerationJob
from minisgl.server.served_engine import ServedTokenizer

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


class Choice(ABC):
    """One choice of a reply, while it is generated. A subclass is the shape of an endpoint."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]  # of the request
    no_content: ClassVar[bytes]  # what `_content` is in the chunk that ends the choice
    # Logprobs are of every token, those of an echo and those without a text included; else they
    # are of exactly the tokens that the generated text is made of.
    scores_all: ClassVar[bool]
    # What is reported of the prompt stands in the reply, beside its choices; else in each of them.
    prompt_in_reply: ClassVar[bool]

    def __init__(
        self,
        job: GenerationJob,
        tokenizer: ServedTokenizer | None,
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
        self._scored = job.params.logprobs is not None
        self._plain = not (continuous_usage or self._scored or job.return_token_ids)
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + tail
        self._started = False
        self._finish_reason: str | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._token_ended = False  # by a token, which is the last and no part of the text
        self._alignment: Alignment | None = None

    def events(self, delta: OutputDelta) -> bytes:
        """The events that tell a client of `delta`; none while its text is held back."""
        self.num_cached_tokens = delta.num_cached_tokens
        events = b"" if self._started else self._opening()
        text = self._take(delta)
        if not self._plain:
            events += self._full_event(text, delta)
        elif text:
            events += self._head + self._content(text) + self._plain_tail
        if self._finish_reason is not None:
            events += self._event(self.no_content, finish_reason=encode(self._finish_reason))
        return events

    def keep(self, delta: OutputDelta) -> None:
        self._texts.append(self._take(delta))
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs

    @property
    def num_scored(self) -> int:
        """Tokens kept with their logprobs."""
        return len(self._logprobs) + len(self._prompt_logprobs)

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        logprobs = None
        if self._scored:
            logprobs = self._show(self._place(text, self._logprobs, self._prompt_logprobs))
        choice = {
            "index": self.job.index,
            **self._whole_content(text),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }
        if not self.prompt_in_reply:
            choice |= self.about_prompt()
        if self.job.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def about_prompt(self) -> dict[str, Any]:
        """What a whole answer reports of the prompt."""
        about: dict[str, Any] = {}
        if self.job.return_token_ids:
            about["prompt_token_ids"] = self.job.prompt_token_ids
        if self.job.prompt_logprobs is not None:
            about["prompt_logprobs"] = [None, *map(self._prompt_token, self._prompt_logprobs)]
        return about

    def check_finished(self) -> None:
        """Called when the stream has ended; raises EngineStoppedError if that came too early."""
        if self._finish_reason is None:
            raise EngineStoppedError("The request was stopped before it had finished.")

    def _take(self, delta: OutputDelta) -> str:
        """The text that `delta` adds to the answer."""
        self.num_output_tokens = delta.num_output_tokens
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish_reason = delta.finish_reason.value
            self._token_ended = isinstance(delta.stop_reason, int)
        started, self._started = self._started, True
        return delta.text if started else (self.job.echo or "") + delta.text

    def _place(
        self, text: str, logprobs: Sequence[TokenLogprobs], prompt_logprobs: Sequence[TokenLogprobs]
    ) -> list[PlacedToken]:
        """The tokens to report with `text`, given those that came with it; the first time with the
        echo."""
        job, tokenizer = self.job, self._tokenizer
        placed: list[PlacedToken] = []
        skip = job.params.skip_special_tokens
        table = tokenizer.byte_table(skip_special_tokens=skip) if tokenizer else {}
        if self._alignment is None:
            echo = job.echo or ""
            text = text[len(echo) :]
            if self.scores_all and job.echo is not None:
                # The first token of a prompt follows nothing, so it has no probability.
                scored = [None, *prompt_logprobs]
                placed = place_prompt(tokenizer, job.prompt_token_ids, scored, echo)
            self._alignment = Alignment(
                start=len(echo),
                # As when decoding: a space is dropped only where the text begins.
                drops_first_space=tokenizer is not None
                and tokenizer.drops_first_space
                and not any(table[token_id] for token_id in job.prompt_token_ids),
            )
        num_tokens = len(logprobs) - self._token_ended
        for place, token in enumerate(logprobs):
            has_text = place < num_tokens and tokenizer is not None
            self._alignment.add(token, table[token.token_id] if has_text else b"")
        placed += self._alignment.show(text, finished=self._finish_reason is not None)
        return placed if self.scores_all else [token for token in placed if token.data]

    def _full_event(self, text: str, delta: OutputDelta) -> bytes:
        placed = self._place(text, delta.logprobs, delta.prompt_logprobs) if self._scored else None
        token_ids = delta.token_ids if self.job.return_token_ids else []
        if not (text or placed or token_ids):
            return b""
        logprobs = encode(self._show(placed)) if placed else b"null"
        return self._event(self._content(text), logprobs, token_ids=token_ids)

    def _event(
        self,
        content: bytes,
        logprobs: bytes = b"null",
        finish_reason: bytes = b"null",
        *,
        token_ids: Sequence[int] = (),
        own: bytes = b"",
        beside: bytes = b"",
    ) -> bytes:
        """`own` are further members of the choice, `beside` of the chunk."""
        if self.job.return_token_ids:
            own += b',"token_ids":' + encode(token_ids)
        start = b'%s%s,"logprobs":%s,"finish_reason":%s%s}]%s' % (
            *(self._head, content, logprobs, finish_reason, own, beside),
        )
        if self._continuous_usage:
            return start + b',"usage":' + encode(usage([self])) + b"}\n\n"
        return start + self._tail

    def _prompt_ids(self) -> bytes:
        return b',"prompt_token_ids":' + encode(self.job.prompt_token_ids)

    def _prompt_token(self, scored: TokenLogprobs) -> dict[int, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(scored.top, 1)}
        found = {scored.token_id: scored.logprob} | dict(scored.top[: self.job.prompt_logprobs])
        return {
            token_id: {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": self._token_text(token_id),
            }
            for token_id, logprob in found.items()
        }

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"

    def _token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""

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
    def _show(self, placed: Sequence[PlacedToken]) -> dict[str, Any]:
        """Logprobs as clients get them."""


class ChatChoice(Choice):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"
    no_content = b'"delta":{}'
    scores_all = False
    prompt_in_reply = True

    def _opening(self) -> bytes:
        beside = self._prompt_ids() if self.job.return_token_ids else b""
        return self._event(b'"delta":{"role":"assistant","content":""}', beside=beside)

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}"

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _show(self, placed: Sequence[PlacedToken]) -> dict[str, Any]:
        return {"content": [*map(self._placed_token, placed)], "refusal": None}

    def _placed_token(self, token: PlacedToken) -> dict[str, Any]:
        scored = token.scored
        assert scored is not None
        own = _ranked(token.text, scored.logprob, token.data)
        top = [own if id == scored.token_id else self._rival(id, lp) for id, lp in scored.top]
        return own | {"top_logprobs": top}

    def _rival(self, token_id: int, logprob: float) -> dict[str, Any]:
        return _ranked(self._token_text(token_id), logprob, self._token_bytes(token_id))


def _ranked(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


class CompletionChoice(Choice):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"
    no_content = b'"text":""'
    scores_all = True
    prompt_in_reply = False

    def _content(self, text: str) -> bytes:
        return b'"text":' + encode(text)

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _opening(self) -> bytes:
        if not self.job.return_token_ids:
            return b""
        return self._event(self.no_content, own=self._prompt_ids())

    def _show(self, placed: Sequence[PlacedToken]) -> dict[str, Any]:
        first = self.job.prompt_token_ids[0]
        return {
            "tokens": [
                self._name(token.scored.token_id if token.scored else first) for token in placed
            ],
            "token_logprobs": [
                token.scored and max(token.scored.logprob, LOWEST_LOGPROB) for token in placed
            ],
            "top_logprobs": [token.scored and self._top(token.scored) for token in placed],
            "text_offset": [token.start for token in placed],
        }

    def _name(self, token_id: int) -> str:
        """The token's text; its bytes if that is none of its own, its id if it has neither."""
        data = self._token_bytes(token_id)
        try:
            return data.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return _spelled(data)

    def _top(self, scored: TokenLogprobs) -> dict[str, float]:
        """By name, where no two have the same. The token itself is among them in any case."""
        own = self._name(scored.token_id)
        found = dict(scored.top[: self.job.params.logprobs]) | {scored.token_id: scored.logprob}
        named: dict[str, float] = {}
        for token_id, logprob in found.items():
            name = self._name(token_id)
            if name in named or (name == own and token_id != scored.token_id):
                # It is the text of another one, too.
                name = _spelled(self._token_bytes(token_id))
                if name in named:
                    name = f"token_id:{token_id}"
            named[name] = max(logprob, LOWEST_LOGPROB)
        return named


def _spelled(data: bytes) -> str:
    """Bytes as OpenAI writes those of a token that is no text of its own."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Reply:
    """The answer to one HTTP request."""

    def __init__(
        self,
        kind: type[Choice],
        jobs: Sequence[GenerationJob],
        *,
        model: str,
        tokenizer: ServedTokenizer | None,
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
        tail = b"%s}\n\n" % (b',"usage":null' if include_usage else b"")
        self.choices = [
            kind(job, tokenizer, head, tail, continuous_usage=continuous_usage) for job in jobs
        ]

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [choice.whole() for choice in self.choices]
        body = self._envelope(self.kind.whole_object)
        body |= {"choices": choices, "usage": usage(self.choices)}
        if self.kind.prompt_in_reply:
            body |= self.choices[0].about_prompt()
        return encode(body)

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
