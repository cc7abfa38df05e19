"""The server that is measured: where it is, and how it wants to be asked."""

from __future__ import annotations

import asyncio
import functools
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from minisgl.bench.address import unreachable
from minisgl.bench.client import Answer, Tally, post
from minisgl.bench.plan import PlannedRequest, chat_text
from minisgl.errors import MinisglError

TIMEOUT_S = 10  # of what is asked beside the load
# What is measured is the server, not a proxy that the environment names.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all connections, because reading the certificates takes many milliseconds."""
    return ssl.create_default_context()


class TargetError(MinisglError):
    """The server does not answer as one of the OpenAI API does."""


class ServedModel(msgspec.Struct):
    """Of a server's list; what it does not tell is None."""

    id: str | None = None
    max_model_len: int | None = None  # minisgl and vLLM tell: tokens of prompt and answer
    vocab_size: int | None = None  # minisgl tells


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server of the OpenAI API."""

    url: str  # as far as /v1
    endpoint: str = "completions"  # or chat
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def root(self) -> str:
        """Where paths beside /v1 begin."""
        return self.url.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

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

    async def ask(self, body: bytes, tally: Tally | None = None) -> Answer:
        """Raises OSError where the connection breaks."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        secure = parts.scheme == "https"
        path = "/chat/completions" if self.endpoint == "chat" else "/completions"
        return await post(
            parts.hostname,
            parts.port or (443 if secure else 80),
            parts.path + path,
            body,
            headers=self.headers,
            tls=_tls() if secure else None,
            tally=tally,
        )

    async def get(self, url: str) -> bytes:
        """What is beside the load, such as /metrics. Raises TargetError."""
        return await asyncio.to_thread(self._get, url)

    def _get(self, url: str) -> bytes:
        request = urllib.request.Request(url, headers=self.headers)
        try:
            with _direct.open(request, timeout=TIMEOUT_S) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            raise TargetError(f"{url} answers {error.code}.") from error
        except OSError as error:
            raise TargetError(unreachable(url, error)) from error
        except http.client.HTTPException as error:
            raise TargetError(f"{url} does not answer in HTTP.") from error


def question(request: PlannedRequest) -> Message:
    return {"role": "user", "content": chat_text(request.prompt)}


async def served_model(target: Target, name: str = "") -> ServedModel:
    """The model of this name, or the first one if it is empty, as far as the server tells.

    Raises TargetError where nothing listens or a key is wanted.
    """
    unknown = ServedModel(name or None)
    try:
        body = await target.get(f"{target.url}/models")
        listed = msgspec.json.decode(body, type=_ModelList).data
    except TargetError as error:
        if not isinstance(error.__cause__, urllib.error.HTTPError):
            raise
        if error.__cause__.code == 401:
            key = "needs a key; give it with" if target.api_key is None else "refuses the key of"
            raise TargetError(f"The server at {target.url} {key} --api-key.") from error
        return unknown
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return unknown
    return next((model for model in listed if name in ("", model.id)), unknown)
