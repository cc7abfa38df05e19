"""A tokenizer with readable tokens, and an engine for the chat that answers with given letters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.config import Capacity
from minisgl.errors import ContextLengthError, InvalidRequestError
from minisgl.images.prompt import Prompt
from minisgl.request import FinishReason, OutputDelta, SamplingParams, Tenant

PIECES = ("<user>", "<model>", "<end>", "<stop>", "ab", "abc", "cd", *"abcdefgh !")


def encode(text: str) -> list[int]:
    """Greedy longest-match encoding."""
    ids = []
    while text:
        piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
        ids.append(PIECES.index(piece))
        text = text.removeprefix(piece)
    return ids


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids)


@dataclass
class ToyTokenizer:
    chat_template_text: str = ""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = ""
        for message in messages:
            content = message["content"]
            if message["role"] == "user":
                if "!" in content:
                    raise InvalidRequestError("messages", "the template does not shout.")
                text += f"<user>{content}<end>"
            else:
                text += f"<model>{content}<end>"
        return encode(text + "<model>")

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id].encode()


def delta(text: str, *, cached: int = 0, reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(encode(text), text, 0, cached, finish_reason=reason)


class FakeDefaults:
    def sampling(self, **chosen: Any) -> SamplingParams:
        return SamplingParams(**chosen)


@dataclass
class FakeEngine:
    """Answers every prompt with the next of `answers`, letter by letter; a `^` raises SIGINT."""

    answers: list[str]
    max_seq_len: int = 1000
    prompts: list[list[int]] = field(default_factory=list)
    num_aborted: int = 0
    deltas: Sequence[OutputDelta] | None = None  # instead of answers

    params: list[SamplingParams] = field(default_factory=list)
    adapters: dict[str, Any] = field(default_factory=dict)  # what is asked for each, by name
    extras: list[Sequence[Any]] = field(default_factory=list)
    tokenizer: ToyTokenizer = field(default_factory=ToyTokenizer)

    defaults = FakeDefaults()
    model_name = "toy"

    @property
    def capacity(self) -> Capacity:
        return Capacity(num_pages=2, page_size=1, num_slots=1, max_seq_len=self.max_seq_len)

    async def encode_chat(self, messages: Sequence[dict[str, str]], any_length: bool) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.chat, messages)

    async def encode_conversation(
        self,
        messages: Sequence[dict[str, str]],
        any_length: bool,
        cache_salt: str | None,
        tenant: Tenant,
    ) -> Prompt:
        return Prompt(await self.encode_chat(messages, any_length))

    def adapter(self, name: str) -> Any:
        return self.adapters[name]

    def submit(self, prompt: list[int], params: SamplingParams, extras: Sequence[Any] = ()) -> Any:
        self.extras.append(extras)
        if self.deltas is not None:
            return GivenStream(self.deltas)
        room = self.max_seq_len - len(prompt)
        if room < 1:
            raise ContextLengthError(len(prompt), None, self.max_seq_len)
        if params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthError(len(prompt), params.max_tokens, self.max_seq_len)
        self.prompts.append(prompt)
        self.params.append(params)
        letters = self.answers.pop(0)[:room]
        reason = FinishReason.LENGTH if len(letters) == room else FinishReason.STOP
        return FakeStream(self, letters, reason)


@dataclass
class GivenStream:
    deltas: Sequence[OutputDelta]

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        for delta in self.deltas:
            yield delta

    def abort(self) -> None:
        pass


@dataclass
class FakeStream:
    engine: FakeEngine
    letters: str
    reason: FinishReason

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        for letter in self.letters:
            if letter == "^":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            yield delta(letter, cached=3)
        yield delta("", cached=3, reason=self.reason)

    def abort(self) -> None:
        self.engine.num_aborted += 1
