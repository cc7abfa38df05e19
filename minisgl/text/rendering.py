"""Renders chat templates in a separate process.

A template is code of the model's author. It may loop for ever or allocate without bound inside a
single operation, where a thread cannot be interrupted. A process can be killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import isfunction, ismethod
from pathlib import Path
from struct import Struct
from typing import IO, Any

import msgspec

from minisgl.errors import EngineStoppedError, InvalidRequestError, MinisglError

RENDER_SECONDS = 10.0
# Memory that a rendering may allocate beyond that of the idle process.
MEMORY_BYTES = 1 << 30
MAX_TEXT_BYTES = 64 << 20  # of a rendered conversation; four times the limit of a request body
MAX_REASON_CHARS = 1000
LENGTH = Struct("!Q")  # precedes every message between the processes

CONTINUE = "continue_final_message"
STOPPED = "The engine was closed before the conversation was rendered."

# The arguments of the library's `render_jinja_template`.
Call = Mapping[str, Any]


def render(call: Call) -> str:
    """Render a conversation in this process, without limits.

    Raises whatever the template raises, and InvalidRequestError if the template cannot leave the
    last message open as `continue_final_message` requires.
    """
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


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The result of the process: a text, or the reason why there is none."""

    text: str | None = None
    reason: str = ""
    param: str = "messages"


class Renderer:
    """A process that renders one conversation at a time, started when first needed."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self.began_s = math.inf  # of the current rendering, time.monotonic; infinite if idle
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the process unless it runs. Does not wait until it is ready."""
        if self._closed.is_set():
            raise EngineStoppedError(STOPPED)
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.wait()
        self._ready = False
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from minisgl.text.rendering import serve; serve({self._seconds!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C must reach only this process
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        if self._closed.is_set():  # by another thread in the meantime
            self._process.kill()

    def render(self, call: bytes) -> str:
        """Render a conversation. Blocks; called by one thread at a time.

        Raises InvalidRequestError if the template raises, or exceeds the limits of time or memory.
        """
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            if not self._ready:
                self._ready = _receive(process.stdout) is not None
            self.began_s = time.monotonic()
            _send(process.stdin, call)
            answer = _receive(process.stdout)
        except (OSError, ValueError):  # a broken pipe
            answer = None
        finally:
            self.began_s = math.inf
        if answer is None:
            raise self._why_it_ended()
        reply = msgspec.json.decode(answer, type=_Rendered)
        if reply.text is None:
            raise InvalidRequestError(reply.param, reply.reason)
        return reply.text

    def close(self) -> None:
        """End the process, whatever it is doing. May be called by any thread."""
        self._closed.set()
        process = self._process
        if process is not None:
            process.kill()

    def wait(self) -> int | None:
        """Wait until the process has ended; returns its exit code, None if it was never started.

        Called by the thread that renders, after `close` or when the process has ended by itself.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # unread calls
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _why_it_ended(self) -> MinisglError:
        code = self.wait()
        if self._closed.is_set():
            return EngineStoppedError(STOPPED)
        if code == -signal.SIGALRM:
            return InvalidRequestError(
                "messages", f"the model's chat template did not end within {self._seconds:g} s."
            )
        return MinisglError(f"The process that renders chat templates ended with {code}.")


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """None where the other side has ended."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    message = pipe.read(length)
    return message if len(message) == length else None


def serve(seconds: float) -> None:
    """Run the process: answer calls until its parent has gone."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    render({"conversations": [[{}]], "chat_template": ""})  # load everything first
    _limit_memory(MEMORY_BYTES)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        _send(answers, b"")  # report that it is ready
        while (call := _receive(calls)) is not None:
            # The default action of SIGALRM kills the process, whatever it executes.
            signal.setitimer(signal.ITIMER_REAL, seconds)
            answer = msgspec.json.encode(_answer(call))
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(answers, answer)
    except BrokenPipeError:
        os._exit(0)  # skip the flush of stdout at exit


def _answer(call: bytes) -> _Rendered:
    try:
        text = render(msgspec.json.decode(call))
        if len(text.encode()) > MAX_TEXT_BYTES:
            return _refused(f"it makes more than {MAX_TEXT_BYTES >> 20} MiB of them.")
    except InvalidRequestError as error:
        return _Rendered(reason=str(error.args[0]), param=error.param)
    except MemoryError:
        return _refused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory.")
    except Exception as error:  # a template may raise anything
        return _refused(str(error).encode("utf-8", "replace").decode()[:MAX_REASON_CHARS])
    return _Rendered(text)


def _refused(reason: str) -> _Rendered:
    return _Rendered(reason=f"the model's chat template refuses them: {reason}")


def _limit_memory(more: int) -> None:
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux; limits of time and text size remain
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
