"""The chat's model on a server of OpenAI's API. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from minisgl.client.address import api_base
from minisgl.client.chunk import CalledFunction, StreamChunk, StreamedCall
from minisgl.client.errors import Refusal, RefusedError, ServerError, not_openai, refused
from minisgl.client.exchange import DOCUMENT_S, Stream, describe_redirect, open_stream
from minisgl.client.models import ServedModel, choose_model, headers_of, list_models
from minisgl.errors import MinisglError
from minisgl.request import FinishReason, SamplingParams

from .model import (
    TEXT,
    AnswerRules,
    CallPiece,
    ContextFullError,
    Message,
    ReplyDelta,
    check_can_chat,
)
from .parameters import NAMES

# Phrases in errors about a conversation that is too long; OpenAI and minisgl use a code.
TOO_LONG_CODE = "context_length_exceeded"
TOO_LONG_WORDS = ("maximum context length", "context size", "context length", "too long")
ANSWER_S = 3600.0
# Of OpenAI's API and what servers have added to it, where SamplingParams has another name.
NAMES_ON_THE_WIRE = {"include_stop": "include_stop_str_in_output"}


class ServerModel:
    """One model of a server, as a `ChatModel`."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: ServedModel,
        timeout_s: float = ANSWER_S,
        listed: Sequence[ServedModel] = (),
    ) -> None:
        """listed: all models of the server."""
        self._base_url = base_url
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._by_name = {served.id: served for served in listed if served.id}
        self._base = self._by_name.get(model.parent or "", model)
        self._model = model

    @classmethod
    async def connect(
        cls, url: str, api_key: str, model: str = "", timeout_s: float = ANSWER_S
    ) -> ServerModel:
        """Lists the models and chooses the one named, or else the first. Raises ServerError."""
        base_url = api_base(url)
        try:
            listed = await list_models(base_url, api_key, min(DOCUMENT_S, timeout_s))
        except RefusedError as error:
            # Some servers have chats and no list of models.
            if not model or error.status != 404:
                raise
            listed = [ServedModel(model)]
        chosen = choose_model(listed, model)
        if chosen is None:
            names = [served.id or "" for served in listed]
            few = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            wanted = f"no model {model}" if model else "no model at all"
            raise ServerError(f"{base_url} has {wanted}" + (f"; it has {few}." if few else "."))
        check_can_chat(chosen.id or "the model", chosen.task or "generate")
        return cls(base_url, api_key, chosen, timeout_s, listed)

    @property
    def adapters(self) -> Sequence[str]:
        return [name for name in self._by_name if name != self._base.id]

    @property
    def adapter(self) -> str:
        return "" if self._model is self._base else self.name

    @adapter.setter
    def adapter(self, name: str) -> None:
        self._model = self._by_name[name] if name else self._base

    @property
    def name(self) -> str:
        return self._model.id or ""

    @property
    def sees(self) -> bool | None:
        kinds = self._model.input_modalities
        return None if kinds is None else "image" in kinds

    @property
    def facts(self) -> Sequence[str]:
        context = self._model.max_model_len
        return (
            self.name,
            f"at {self._base_url}",
            *([f"context {context:,} tokens"] if context else []),
        )

    @property
    def max_seq_len(self) -> int | None:
        return self._model.max_model_len

    @property
    def sampling_defaults(self) -> None:
        return None

    def check(self, sampling: Mapping[str, Any]) -> None:
        SamplingParams(**{name: sampling[name] for name in NAMES if name in sampling})

    async def check_rules(self, rules: AnswerRules) -> None:
        """The server checks them with each question."""

    def status(self) -> Sequence[tuple[str, str]]:
        return ()

    async def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], rules: AnswerRules = TEXT
    ) -> AsyncGenerator[ReplyDelta, None]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{NAMES_ON_THE_WIRE.get(name, name): value for name, value in sampling.items()},
        }
        if rules.schema is not None:
            named = {"name": "answer", "schema": rules.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if rules.tools:
            body["tools"] = rules.tools
        url = f"{self._base_url}/chat/completions"
        opened = open_stream(
            "POST",
            url,
            headers_of(self._api_key),
            json.dumps(body).encode(),
            timeout_s=self._timeout_s,
        )
        async with opened as stream:
            if stream.head.status != 200:
                raise await _failure(stream, url, self._api_key)
            finished = False
            async for data in stream.data():
                chunk = self._read(data)
                if chunk.error is not None:
                    said = Refusal.read(msgspec.json.encode({"error": chunk.error}), self._api_key)
                    raise _too_long(said) or ServerError(f"{self._base_url}: {said.message}")
                delta = _delta(chunk)
                finished = finished or delta.finish_reason is not None
                yield delta
            if not finished:
                raise ServerError(f"{self._base_url} ended its answer too early.")

    def _read(self, data: bytes) -> StreamChunk:
        try:
            return msgspec.json.decode(data, type=StreamChunk)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_openai(self._base_url, error) from error


def _delta(chunk: StreamChunk) -> ReplyDelta:
    delta = ReplyDelta()
    if chunk.choices:
        choice = chunk.choices[0]
        if choice.delta is not None:
            delta.text, delta.thinking = choice.delta.content or "", choice.delta.thinking
            delta.calls = [_piece(call) for call in choice.delta.tool_calls or ()]
        if choice.finish_reason is not None:
            is_cut = choice.finish_reason == "length"
            delta.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    if chunk.usage is not None:
        delta.num_tokens = chunk.usage.completion_tokens
        delta.num_prompt_tokens = chunk.usage.prompt_tokens
        delta.num_cached_tokens = chunk.usage.details.cached_tokens
        delta.num_drafted_tokens, delta.num_accepted_tokens = chunk.usage.drafts
    return delta


def _piece(call: StreamedCall) -> CallPiece:
    function = call.function or CalledFunction()
    return CallPiece(call.index, call.id or "", function.name or "", function.arguments or "")


async def _failure(stream: Stream, url: str, api_key: str) -> MinisglError:
    """The exception for a response with an error status."""
    if (place := stream.head.redirect) is not None:
        return ServerError(f"{url} {describe_redirect(url, place)}")
    body = await stream.whole()
    if (too_long := _too_long(Refusal.read(body, api_key))) is not None:
        return too_long
    return refused("The server", stream.head.status, body, api_key)


def _too_long(said: Refusal) -> ContextFullError | None:
    words = said.message.lower()
    if said.code == TOO_LONG_CODE or any(known in words for known in TOO_LONG_WORDS):
        return ContextFullError(said.message)
    return None
