"""The errors that minisgl raises on purpose.

Each leaf says whose fault it is: `http_status` is what the server answers, `exit_code` what the
command line returns (2: the caller asked for something wrong, and would again; 1: something
failed, which another start may mend).
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import ClassVar

UNFORESEEN = "Something went wrong here."


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
    logged = "invalid request"  # the reason for logs, without a word of the caller

    def __init__(self, message: str = "", *, logged: str | None = None) -> None:
        super().__init__(message)
        if logged is not None:
            self.logged = logged


class ConfigError(CallerError):
    """An engine option has a value that cannot be used."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        """value: True for a flag, of which only the name is shown."""
        super().__init__(f"{option if value is True else f'{option} {value}'}: {allowed}")
        self.param = option
        self.allowed = allowed


class InvalidRequestError(CallerError):
    """A field of a request is wrong. `param` names it; who knows its name better may change it."""

    logged = "invalid value"

    def __init__(self, param: str, message: str, *, logged: str | None = None) -> None:
        super().__init__(message, logged=logged)
        self.param: str = param

    def __str__(self) -> str:
        return f"{self.param}: {self.args[0]}"


class ThreadError(InvalidRequestError):
    """A request of the Messages API goes on with messages that only Anthropic's servers keep.

    Its client sends all of them again when it reads this code.
    """

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("thread", "is not kept here: send the whole conversation in messages.")


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit into the longest sequence.

    `param` is the limit where no prompt at all would fit beside it, and the prompt otherwise.
    Clients know this error by its words, which are OpenAI's.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        max_seq_len: int,
        *,
        at_least: bool = False,
        prompt_field: str = "prompt",
        limit_field: str = "max_tokens",
    ) -> None:
        """`at_least`: the prompt was not tokenized, because so many tokens are too many already."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_seq_len = max_seq_len
        self._max_tokens = max_tokens
        self._at_least = at_least
        about = "at least " if at_least else ""
        room = max_seq_len - num_prompt_tokens
        said = f"This model's maximum context length is {max_seq_len} tokens. However, "
        shorten = f"Please reduce the length of the {prompt_field}"
        if max_tokens is None:
            said += (
                f"your {prompt_field} resulted in {about}{num_prompt_tokens} tokens, which leaves "
                f"no room for an answer. {shorten}."
            )
        elif max_tokens == 0:
            said += f"your {prompt_field} resulted in {about}{num_prompt_tokens} tokens. {shorten}."
        else:
            said += (
                f"you requested {about}{num_prompt_tokens + max_tokens} tokens "
                f"({num_prompt_tokens} in the {prompt_field}, {max_tokens} in the completion). "
                f"{shorten} or completion."
            )
            if room > 0:
                said += (
                    f" With this prompt {limit_field} may be up to {room}; a server with "
                    "--clamp-max-tokens lowers it by itself."
                )
        limit_alone = room > 0 and max_tokens is not None and max_tokens >= max_seq_len
        super().__init__(limit_field if limit_alone else prompt_field, said)

    def __str__(self) -> str:
        return str(self.args[0])

    def with_names(
        self, *, prompt_field: str, limit_field: str | None = None
    ) -> ContextLengthError:
        """The same error of a caller who knows the fields by these names; without a limit, of a
        prompt that no answer is to follow."""
        return ContextLengthError(
            self.num_prompt_tokens,
            0 if limit_field is None else self._max_tokens,
            self.max_seq_len,
            at_least=self._at_least,
            prompt_field=prompt_field,
            limit_field=limit_field or "max_tokens",
        )


class TextTooLongError(InvalidRequestError):
    """A text is longer than what is tokenized at all, whatever its tokens are."""

    code = "context_length_exceeded"


class GrammarError(CallerError):
    """An answer could not be held to its grammar any further; other requests continue.

    What a grammar costs depends on the answer, so that not every one is refused at submission.
    """

    code = "grammar_failed"

    def __init__(self, reason: str) -> None:
        """reason: without a word of the grammar or of the answer."""
        super().__init__(f"The answer cannot be constrained any further: {reason}.")


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


class DeadlineError(MinisglError):
    """A request has taken as long as it may."""

    http_status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    # Clients of OpenAI and Anthropic send a request that fails so again, unless they are told.
    headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}

    def __init__(self) -> None:
        super().__init__("The request has taken as long as its timeout allows.")


class CheckpointError(MinisglError):
    """A checkpoint is incomplete or does not fit its own config."""

    exit_code = 2


class DownloadError(MinisglError):
    """A model could not be downloaded for the moment; another attempt may succeed."""


class DeviceMemoryError(MinisglError):
    """The device has too little memory for what the options, or a trainer, ask for."""

    http_status = 503
    type = "service_unavailable"
    code = "out_of_memory"


class CaptureError(MinisglError):
    """A step of this model cannot be captured as a CUDA graph on this device."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        super().__init__(
            "A step of this model cannot be captured as a CUDA graph here: "
            f"{reason.rstrip('.')}. --cuda-graph-max-bs 0 runs it without one, which takes longer."
        )


class StepError(MinisglError):
    """A step failed on the device; the requests in it are lost, the engine goes on."""


class EngineStoppedError(MinisglError):
    """The engine is draining, closed or dead and takes no more work."""

    http_status = 503
    type = "service_unavailable"


class HostMemoryError(MinisglError):
    """A request asked for more memory than the host has left; others go on."""

    http_status = 503
    type = "service_unavailable"
    code = "out_of_memory"

    def __init__(self) -> None:
        super().__init__("The server is short of memory; try again later, or ask for less.")


def foreseen(error: BaseException) -> MinisglError:
    """What a caller is told of an error. Of one that nobody foresaw only the log knows more."""
    if isinstance(error, MinisglError):
        return error
    short = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return HostMemoryError() if short else MinisglError(UNFORESEEN)


def without_words(error: BaseException) -> str:
    """Type and stack of an error that nobody foresaw, for the log.

    Its message is left out: it may hold a piece of somebody's prompt or answer.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{frames}".rstrip()


def in_one_line(error: BaseException) -> str:
    """The kind of an error of other code, and what it says: its first words where that is long."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said if len(said) <= 300 else f'{said[:300]}...'}"


def one_of(values: Iterable[object]) -> str:
    """'allowed: a, b or c', for messages."""
    *rest, last = [str(value) for value in values]
    return f"allowed: {', '.join(rest)} or {last}" if rest else f"allowed: {last}"


def nearest(
    name: str, names: Iterable[str], familiar: Mapping[str, str] | None = None
) -> str | None:
    """The one of `names` that is meant by a name which is none of them; None: none is like it.

    familiar: names that other programs have, and what they are here.
    """
    return (familiar or {}).get(name) or next(iter(get_close_matches(name, names, n=1)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is none of `names`: those that are like it."""
    near = get_close_matches(name, sorted(names), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else "."
