"""The server that is measured: its address, and the form of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.online.client import RecordedAnswer, RunProgress, post
from minisgl.bench.workload.requests import ScheduledRequest
from minisgl.bench.workload.schedule import chat_text
from minisgl.bench.workload.structured import RESPONSE_FORMAT
from minisgl.client.address import Address
from minisgl.client.errors import NotOpenAIError, RefusedError, refused
from minisgl.client.exchange import DOCUMENT_S, get, open_stream
from minisgl.client.models import ServedModel, choose_model, headers_of, list_models

# Maximum size of an answer: a constant, and per token. Servers send about 400 bytes a token.
ANSWER_BYTES, TOKEN_BYTES = 1 << 20, 4 << 10

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server of the OpenAI API."""

    url: str  # as far as /v1
    endpoint: str = "completions"  # or chat, or embeddings
    model: str | None = None
    api_key: str = field(default="", repr=False)
    temperature: float = 0.0
    ignore_eos: bool = True
    document_s: float = DOCUMENT_S  # timeout of requests outside of the load

    @property
    def root(self) -> str:
        """The base of paths outside of /v1."""
        return self.url.removesuffix("/v1")

    @property
    def path(self) -> str:
        """The path of requests, below /v1."""
        return "/chat/completions" if self.endpoint == "chat" else f"/{self.endpoint}"

    def body(self, request: ScheduledRequest, history: Sequence[Message] = ()) -> bytes:
        """The JSON of a request for exactly `max_tokens` tokens, or at most that many; or for a
        vector."""
        if self.endpoint == "embeddings":
            named = {} if self.model is None else {"model": self.model}
            return msgspec.json.encode(
                {"input": request.prompt, "encoding_format": "base64", **named}
            )
        asked: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            asked["messages"] = [*history, question(request)]
        else:
            asked["prompt"] = request.prompt if request.text is None else request.text
        if self.model is not None:
            asked["model"] = self.model
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if request.structured:
            asked["response_format"] = RESPONSE_FORMAT
        return msgspec.json.encode(asked)

    async def ask(
        self, body: bytes, max_tokens: int, progress: RunProgress | None = None
    ) -> RecordedAnswer:
        """Send a request. Raises OSError if the connection breaks or the answer is far too long."""
        return await post(
            Address.of(self.url + self.path),
            body,
            headers=headers_of(self.api_key),
            progress=progress,
            max_bytes=ANSWER_BYTES + TOKEN_BYTES * max_tokens,
        )

    async def send(self, url: str, body: bytes) -> bytes:
        """Send a document outside of the load, and get the answer. Raises ServerError."""
        async with open_stream(
            "POST", url, headers_of(self.api_key), body, timeout_s=self.document_s
        ) as stream:
            found = await stream.whole()
            if stream.head.status != 200:
                raise refused(url, stream.head.status, found, self.api_key)
            return found

    async def get(self, url: str) -> bytes:
        """Get a document such as /metrics. Raises ServerError."""
        status, body = await get(url, headers_of(self.api_key), self.document_s)
        if status != 200:
            raise refused(url, status, body, self.api_key)
        return body


def question(request: ScheduledRequest) -> Message:
    text = chat_text(request.prompt) if request.text is None else request.text
    return {"role": "user", "content": text}


async def served_model(target: Endpoint, name: str = "") -> ServedModel:
    """The model called `name`, or the first one if `name` is empty, as far as it is known.

    Raises ServerError if no server answers or it requires a key.
    """
    unknown = ServedModel(name or None)
    try:
        listed = await list_models(target.url, target.api_key, target.document_s)
    except NotOpenAIError:
        return unknown
    except RefusedError as error:
        if error.status == 401:
            raise
        return unknown
    return choose_model(listed, name) or unknown
