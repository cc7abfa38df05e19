"""The server that is measured: where it is, and how it wants to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.online.client import EventCount, RecordedAnswer, post
from minisgl.bench.workload.plan import PlannedRequest, chat_text
from minisgl.client.address import Address
from minisgl.client.errors import NotOpenAIError, RefusedError, refused
from minisgl.client.exchange import DOCUMENT_S, get
from minisgl.client.models import ServedModel, choose_model, headers_of, list_models

# Of an answer, beside what comes with each of its tokens. Servers send some 400 with one.
ANSWER_BYTES, TOKEN_BYTES = 1 << 20, 4 << 10

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server of the OpenAI API."""

    url: str  # as far as /v1
    endpoint: str = "completions"  # or chat
    model: str | None = None
    api_key: str = field(default="", repr=False)
    temperature: float = 0.0
    ignore_eos: bool = True
    document_s: float = DOCUMENT_S  # for what is asked beside the load

    @property
    def root(self) -> str:
        """Where paths beside /v1 begin."""
        return self.url.removesuffix("/v1")

    def body(self, request: PlannedRequest, history: Sequence[Message] = ()) -> bytes:
        """Asks for exactly the tokens of `request`, or for at most so many."""
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
            asked["prompt"] = request.prompt
        if self.model is not None:
            asked["model"] = self.model
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return msgspec.json.encode(asked)

    async def ask(
        self, body: bytes, max_tokens: int, tally: EventCount | None = None
    ) -> RecordedAnswer:
        """Raises OSError where the connection breaks, also by an answer that is far too long."""
        path = "/chat/completions" if self.endpoint == "chat" else "/completions"
        address = Address.of(self.url + path)
        return await post(
            address.host,
            address.port,
            address.target,
            body,
            headers=headers_of(self.api_key),
            secure=address.secure,
            tally=tally,
            max_bytes=ANSWER_BYTES + TOKEN_BYTES * max_tokens,
        )

    async def get(self, url: str) -> bytes:
        """What is beside the load, such as /metrics. Raises ServerError."""
        found = await get(url, headers_of(self.api_key), self.document_s)
        if found.status != 200:
            raise refused(url, found.status, found.body, self.api_key)
        return found.body


def question(request: PlannedRequest) -> Message:
    return {"role": "user", "content": chat_text(request.prompt)}


async def served_model(target: Target, name: str = "") -> ServedModel:
    """The model of this name, or the first one if it is empty, as far as the server tells.

    Raises ServerError where nothing answers or a key is wanted.
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
