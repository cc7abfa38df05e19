"""Errors of servers as clients see them, and the messages in their responses."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from minisgl.errors import MinisglError
from minisgl.printable import printable

MAX_CHARS = 300  # of a server's message
KEY_OPTIONS = "--api-key, --api-key-file or MINISGL_API_KEY"


class ServerError(MinisglError):
    """A server cannot be reached, rejects a request or breaks off."""


class NotOpenAIError(ServerError):
    """The server answers, but not in the form of OpenAI's API."""


class RefusedError(ServerError):
    """The server answers with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AnswerError(ConnectionError):
    """A protocol error of a server. The message follows the server's name in a sentence."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error in the body of a response with an error status."""

    message: str  # a line, or nothing
    code: str | None = None

    @classmethod
    def read(cls, body: bytes, api_key: str) -> Refusal:
        """Extracts the message from any of the common error envelopes."""
        code, message = None, body[: 16 * MAX_CHARS].decode("utf-8", "replace")
        try:
            found = msgspec.json.decode(body)
            while isinstance(found, dict):
                code = found.get("code", code)
                keys = ("error", "message", "detail")
                found = next((found[key] for key in keys if key in found), "")
            message = found if found and isinstance(found, str) else message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # a proxy's page, perhaps
        said = one_line(_without_key(message, api_key))
        return cls(said, code if isinstance(code, str) else None)


def _without_key(text: str, api_key: str) -> str:
    """Hides the key, which servers repeat in their errors."""
    return re.sub(rf"(?<!\w){re.escape(api_key)}(?!\w)", "(your key)", text) if api_key else text


def one_line(text: str) -> str:
    """The beginning of a server's text on one line, without control characters."""
    return " ".join(printable(" ".join(text.split())).split())[:MAX_CHARS]


def refused(who: str, status: int, body: bytes, api_key: str) -> RefusedError:
    message = Refusal.read(body, api_key).message
    said = f"{who} answers {status}: {message}" if message else f"{who} answers {status}."
    if status == 401:
        advice = (
            "It does not take the key that it was given."
            if api_key
            else f"Give it a key with {KEY_OPTIONS}."
        )
        said = f"{said.rstrip('.')}. {advice}"
    return RefusedError(status, said)


def not_openai(base_url: str, error: Exception) -> NotOpenAIError:
    return NotOpenAIError(f"{base_url} does not speak OpenAI's API: {one_line(str(error))}.")


def unreachable(url: str, error: OSError) -> ServerError:
    """The error for a failed connection."""
    # asyncio lists the addresses that it has tried, if they are several.
    refused = isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error)
    reason = "no server answers there" if refused else str(error.strerror or error)
    return ServerError(f"{url} cannot be reached: {reason}.")
