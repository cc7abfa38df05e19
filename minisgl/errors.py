"""The errors that minisgl raises on purpose.

Each leaf says whose fault it is: `http_status` is what the server answers, `exit_code` what the
command line returns (2: the caller asked for something wrong, and would again; 1: something
failed, which another start may mend).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class MinisglError(Exception):
    """Base of everything below. The message is for people and stands alone in one or two lines."""

    http_status = 500
    exit_code = 1
    type = "internal_error"
    code: str | None = None
    param: str | None = None


# -- the caller's fault ---------------------------------------------------------------------------


class CallerError(MinisglError):
    http_status = 400
    exit_code = 2
    type = "invalid_request_error"


class ConfigError(CallerError):
    """An engine option has a value that cannot be used."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} {value}: {allowed}")
        self.param = option


class InvalidRequestError(CallerError):
    """A field of a request is wrong. `param` names it; who knows its name better may change it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param: str = param

    def __str__(self) -> str:
        return f"{self.param}: {self.args[0]}"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit into the longest sequence."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, max_tokens: int | None, max_seq_len: int) -> None:
        wanted = f"The prompt has {num_prompt_tokens} tokens"
        if max_tokens is not None:
            wanted += f" and max_tokens is {max_tokens}"
        said = f"{wanted}; a sequence holds at most {max_seq_len} tokens."
        if max_tokens is not None and 0 < (room := max_seq_len - num_prompt_tokens) < max_tokens:
            said += (
                f" Lower max_tokens to {room}; a server with --clamp-max-tokens does so by itself."
            )
        super().__init__("prompt", said)


class UnsupportedModelError(CallerError):
    """The checkpoint asks for arithmetic that minisgl does not implement."""


class ModelNotFoundError(CallerError):
    """No model at this path or under this name, or no way to download it."""

    http_status = 404
    code = "model_not_found"


# -- not the caller's fault -----------------------------------------------------------------------


class QueueFullError(MinisglError):
    """Too many requests are waiting already."""

    http_status = 429
    type = "rate_limit_error"
    code = "queue_full"


class CheckpointError(MinisglError):
    """A checkpoint is incomplete or does not fit its own config."""


class DownloadError(MinisglError):
    """A model could not be downloaded for the moment; another attempt may succeed."""


class DeviceMemoryError(MinisglError):
    """The device has too little memory for what the options ask for."""


class StepError(MinisglError):
    """A step failed on the device; the requests in it are lost, the engine goes on."""


class EngineStoppedError(MinisglError):
    """The engine is draining, closed or dead and takes no more work."""

    http_status = 503
    type = "service_unavailable"


def without_words(error: BaseException) -> str:
    """Type and stack of an error that nobody foresaw, for the log.

    Its message is left out: it may hold a piece of somebody's prompt or answer.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{frames}".rstrip()


def one_of(values: Iterable[object]) -> str:
    """'allowed: a, b or c', for messages."""
    *rest, last = [str(value) for value in values]
    return f"allowed: {', '.join(rest)} or {last}" if rest else f"allowed: {last}"
