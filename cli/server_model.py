"""A chat with a server that speaks OpenAI's API. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from minisgl.bench.address import api_base
from minisgl.bench.chunk import Chunk
from minisgl.request import FinishReason, SamplingParams

from .http_stream import HttpAnswer, ServerError, request
from .model import ContextFullError, Message, ReplyDelta
from .parameters import NAMES

# What servers say of a conversation that is too long; OpenAI and minisgl have a code for it.
TOO_LONG_CODE = "context_length_exceeded"
TOO_LONG_WORDS = ("maximum context length", "context size", "context length", "too long")
MAX_ERROR_CHARS = 300
# Of OpenAI's API and what servers have added to it, where SamplingParams has another name.
NAMES_ON_THE_WIRE = {"include_stop": "include_stop_str_in_output"}


class ServedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # minisgl and vLLM say so


class ModelList(msgspec.Struct):
    data: list[ServedModel]


class ServerModel:
    """One model of a server."""

    def __init__(self, base_url: str, api_key: str, model: ServedModel) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._model = model

    @classmethod
    async def connect(cls, url: str, api_key: str, model: str = "") -> ServerModel:
        """Asks for the models and takes the one named, or else the first. Raises ServerError."""
        base_url = api_base(url)
        async with request("GET", f"{base_url}/models", _headers(api_key)) as answer:
            # Some servers have chats and no list of models.
            if model and answer.status == 404:
                return cls(base_url, api_key, ServedModel(model))
            listed = _decode(await _whole(answer), ModelList, base_url).data
        names = [served.id for served in listed]
        if not listed or (model and model not in names):
            few = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            wanted = f"no model {model}" if model else "no model at all"
            raise ServerError(f"{base_url} has {wanted}" + (f"; it has {few}." if few else "."))
        return cls(base_url, api_key, listed[names.index(model) if model else 0])

    @property
    def name(self) -> str:
        return self._model.id

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

    def status(self) -> Sequence[tuple[str, str]]:
        return ()

    async def reply(
        self, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[ReplyDelta, None]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{NAMES_ON_THE_WIRE.get(name, name): value for name, value in sampling.items()},
        }
        url = f"{self._base_url}/chat/completions"
        async with request("POST", url, _headers(self._api_key), json.dumps(body).encode()) as http:
            if http.status != 200:
                await _whole(http)
            finished = False
            async for data in events(http):
                chunk = _decode(data, Chunk, self._base_url)
                if chunk.error is not None:
                    raise _error_of(msgspec.json.encode({"error": chunk.error}), self._base_url)
                delta = _delta(chunk)
                finished = finished or delta.finish_reason is not None
                yield delta
            if not finished:
                raise ServerError(f"{self._base_url} ended its answer too early.")


async def events(http: HttpAnswer) -> AsyncIterator[bytes]:
    """The data of each server-sent event but the last, [DONE]."""
    rest = b""
    async for piece in http.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            # No API puts the data of an event on several lines; the rest are comments and names.
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield data


def _headers(api_key: str) -> dict[str, str]:
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"content-type": "application/json", "accept": "*/*", "user-agent": "minisgl", **key}


def _delta(chunk: Chunk) -> ReplyDelta:
    delta = ReplyDelta()
    if chunk.choices:
        choice = chunk.choices[0]
        if choice.delta is not None:
            delta.text, delta.thinking = choice.delta.content or "", choice.delta.thinking
        if choice.finish_reason is not None:
            is_cut = choice.finish_reason == "length"
            delta.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    if chunk.usage is not None:
        delta.num_tokens = chunk.usage.completion_tokens
        delta.num_prompt_tokens = chunk.usage.prompt_tokens
        delta.num_cached_tokens = chunk.usage.cached_tokens
    return delta


async def _whole(http: HttpAnswer) -> bytes:
    """The body of an answer that is not streamed. Raises ServerError for a status of failure."""
    body = b"".join([piece async for piece in http.pieces()])
    if http.status != 200:
        error = _error_of(body, f"The server answers {http.status}")
        if http.status == 401:
            raise ServerError(f"{str(error).rstrip('.')}. Give it a key with --api-key.")
        raise error
    return body


def _error_of(body: bytes, who: str) -> ServerError | ContextFullError:
    """The sentence that a server has for people, out of whatever envelope it comes in."""
    code, message = None, body.decode("utf-8", "replace")
    try:
        found = msgspec.json.decode(body)
        while isinstance(found, dict):
            code = found.get("code", code)
            found = next((found[key] for key in ("error", "message", "detail") if key in found), "")
        message = found if isinstance(found, str) else message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # a proxy's page, perhaps
    message = " ".join(message.split())[:MAX_ERROR_CHARS]
    if code == TOO_LONG_CODE or any(words in message.lower() for words in TOO_LONG_WORDS):
        return ContextFullError(message)
    return ServerError(f"{who}: {message}" if message else f"{who}.")


def _decode(data: bytes, kind: type[Any], base_url: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServerError(f"{base_url} does not speak OpenAI's API: {error}.") from error
