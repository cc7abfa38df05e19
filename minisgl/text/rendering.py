"""Renders chat templates in a separate process.

A template is code of the model's author. It may loop for ever or allocate without bound inside a
single operation, where a thread cannot be interrupted. A process can be killed. What a rendering
needs, which takes a second to load, is there in the next one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import isfunction, ismethod
from typing import Any, NoReturn

import msgspec

from minisgl.errors import InvalidRequestError
from minisgl.subprocesses import MEMORY_BYTES, TIME_IS_UP, Worker, serve_tasks
from minisgl.text.control_spellings import Marker, Spellings

RENDER_SECONDS = 10.0
MAX_TEXT_BYTES = 64 << 20  # of a rendered conversation; four times the limit of a request body
MAX_REASON_CHARS = 1000

TEXT_ARGUMENT = "input"  # has what a model wrote where arguments must be an object

CONTINUE = "continue_final_message"
STOPPED = "The engine was closed before the conversation was rendered."

# The arguments of the library's `render_jinja_template`, and with SPELLINGS what Spellings has.
Call = Mapping[str, Any]
SPELLINGS = "control_spellings"


def render(call: Call) -> str:
    """Render a conversation in this process, without limits.

    With SPELLINGS the text has their sign (see Spellings.signed) if a message has control tokens as
    text. Raises whatever the template raises, and InvalidRequestError if the template cannot leave
    the last message open as `continue_final_message` requires.
    """
    if SPELLINGS not in call:
        return _render(call)
    arguments = dict(call)
    spellings = Spellings(**arguments.pop(SPELLINGS))
    marker = Marker(spellings)
    text = _render(marker.mark_call(arguments))
    return spellings.signed(text) if marker.found else text


def _render(call: Call) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second

    try:
        texts: Any = render_jinja_template(**call)[0]  # annotated as str, but it is a list of them
    except ValueError:
        if not call.get(CONTINUE):
            raise
        # The library's message quotes the whole conversation.
        changes = "is not possible: the model's chat template changes the end of the message."
        raise InvalidRequestError(CONTINUE, changes) from None
    return str(texts[0])


def encode_call(call: Call) -> bytes:
    """Encode a call as the plain data that `Renderer.render` takes."""
    try:
        return msgspec.json.encode(call, enc_hook=_plain)
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            "messages", f"cannot be handed to the chat template: {error}"
        ) from error


def _plain(value: object) -> object:
    """Convert a value that is not JSON in the way the library does for a template."""
    if isfunction(value) or ismethod(value):  # a tool
        from transformers.utils.chat_template_utils import get_json_schema

        return get_json_schema(value)
    if getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return value.item()  # type: ignore[attr-defined]
    return f"<{type(value).__name__}>"


class EndlessTemplateError(InvalidRequestError):
    """A rendering was ended because it took too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__("messages", f"the model's chat template did not end within {seconds:g} s.")


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The result of the process: a text, or the reason why there is none."""

    text: str | None = None
    is_ended: bool = False  # as it took too long
    reason: str = ""
    param: str = "messages"


class Renderer(Worker):
    """A process that renders one conversation at a time, started when first needed."""

    def __init__(
        self,
        seconds: float = RENDER_SECONDS,
        *,
        processor_seconds: float = 0,
        niceness: int = 0,
    ) -> None:
        """A rendering may take `seconds`, and `processor_seconds` of a processor if that is not 0.

        They get less of a processor than others, as `niceness` says to the system.
        """
        serve = f"serve({seconds!r}, {processor_seconds!r}, {niceness})"
        code = f"from minisgl.text.rendering import serve; {serve}"
        super().__init__(code, does="renders chat templates", stopped=STOPPED)
        self.seconds = seconds
        self.processor_seconds = processor_seconds

    def render(self, call: bytes) -> str:
        """Render a conversation. Blocks; called by one thread at a time.

        Raises InvalidRequestError if the template raises, or exceeds the limits of time or memory;
        EndlessTemplateError if it exceeds `processor_seconds`.
        """
        reply = msgspec.json.decode(self.ask(call), type=_Rendered)
        if reply.is_ended:
            raise EndlessTemplateError(self.processor_seconds or self.seconds)
        if reply.text is None:
            raise InvalidRequestError(reply.param, reply.reason)
        return reply.text


def serve(seconds: float, processor_seconds: float, niceness: int) -> NoReturn:
    """Run the process: answer calls until its parent has gone."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    render({"conversations": [[{}]], "chat_template": ""})  # load everything first
    os.nice(niceness)
    is_ended = msgspec.json.encode(_Rendered(is_ended=True))
    serve_tasks(
        calls,
        answers,
        lambda call: msgspec.json.encode(answer(call)),
        lambda number: is_ended if number in TIME_IS_UP else None,
        {signal.ITIMER_REAL: seconds, signal.ITIMER_PROF: processor_seconds},
    )


def answer(call: bytes) -> _Rendered:
    """What the process answers to a call."""
    from jinja2 import TemplateSyntaxError

    try:
        decoded = msgspec.json.decode(call, type=dict[str, Any])
    except (ValueError, RecursionError):  # of what clients send, the rest was decoded before
        return _Rendered(
            reason="have a number that is out of range, as 1e999 is, or are nested too deeply, in "
            "chat_template_kwargs."
        )
    try:
        text = render(decoded)
        if len(text.encode()) > MAX_TEXT_BYTES:
            return _refused(f"it makes more than {MAX_TEXT_BYTES >> 20} MiB of them.")
    except InvalidRequestError as error:
        return _Rendered(reason=str(error.args[0]), param=error.param)
    except TemplateSyntaxError as error:
        place = f"in line {error.lineno}: {error.message}"
        return _Rendered(reason=f"the model's chat template has a syntax error {place}")
    except MemoryError:
        return _refused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory.")
    except Exception as error:  # a template may raise anything
        reason = str(error) or type(error).__name__
        return _refused(reason.encode("utf-8", "replace").decode()[:MAX_REASON_CHARS])
    return _Rendered(text)


def _refused(reason: str) -> _Rendered:
    return _Rendered(reason=f"the model's chat template refuses them: {reason}")
