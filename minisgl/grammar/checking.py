"""Tries grammars in a process that can be killed.

Compiling is native code that cannot be interrupted: some grammars of a few kilobytes take minutes
or overflow the stack. A grammar that this process has compiled in time is safe for others.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import ClassVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl.grammar.schema import explain, ignored_keyword, rounded_value, tidy
from minisgl.grammar.source import (
    BLANK,
    OPTIONS,
    WHITESPACE,
    Source,
    grammar_text,
    inline_regex,
)
from minisgl.grammar.vocabulary import Outline, sketch
from minisgl.grammar.walking import walk
from minisgl.subprocesses import TIME_IS_UP, Worker, receive, serve_tasks

# Seconds of a grammar on the clock, for a process that gets nothing of a processor.
CLOCK_SECONDS = 30.0
# The stack of a thread where the system sets no limit; otherwise the limit is its size.
THREAD_STACK_BYTES = 2 << 20
BYTES_PER_CHAR = 100  # of memory, for a character of a grammar, where it cannot be measured
TOO_LARGE = "it is too large or nested too deeply to compile."
NOT_BLANK = (
    "its whitespace_pattern may match blanks only: spaces, tabs, line feeds and carriage returns."
)
CLOSED = "The engine was closed before the grammar was compiled."
# Errors must not quote what a client sent, for they may end up in a log. An optional property takes
# four items, and the limit on the time of a token comes before this one.
LIMITS = LLParserLimits(verbose_errors=False, max_items_in_row=20_000)


class Checked(msgspec.Struct, frozen=True):
    """What came of a grammar: its text as llguidance compiles it, or the reason against it."""

    text: str = ""
    reason: str = ""
    ignored_keywords: tuple[str, ...] = ()
    num_bytes: int = 0  # of memory that it takes, compiled
    is_slow: bool = False  # it was killed


class Checker(Worker):
    """A process that tries one grammar at a time, started when first needed."""

    def __init__(self, outline: Outline, processor_seconds: float) -> None:
        super().__init__(
            f"from minisgl.grammar.checking import serve; serve({processor_seconds!r})",
            does="tries grammars",
            stopped=CLOSED,
            opening=msgspec.json.encode(asdict(outline)),
            stderr=subprocess.DEVNULL,  # where llguidance's panics quote a grammar
        )

    def check(self, source: Source) -> Checked:
        """Try a grammar. Blocks; called by one thread at a time. Raises EngineStoppedError."""
        return msgspec.json.decode(self.ask(msgspec.json.encode(source)), type=Checked)


def serve(processor_seconds: float) -> None:
    """Run the process: try grammars until its parent has gone."""
    message = receive(sys.stdin.buffer)
    if message is None:
        return
    outline = msgspec.json.decode(message, type=Outline)
    tokenizer = sketch(outline)
    _limit_stack()

    def answer(message: bytes) -> bytes:
        source = msgspec.json.decode(message, type=Source)
        return msgspec.json.encode(check(tokenizer, outline, source))

    def killed(number: int) -> bytes:
        return msgspec.json.encode(Checked(reason=TOO_LARGE, is_slow=number in TIME_IS_UP))

    timers = {signal.ITIMER_REAL: CLOCK_SECONDS, signal.ITIMER_PROF: processor_seconds}
    serve_tasks(sys.stdin.buffer, sys.stdout.buffer, answer, killed, timers)


def _limit_stack() -> None:
    """Leave this process half the stack of the thread in which the grammar is compiled next."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    of_thread = THREAD_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (of_thread // 2, hard))


def check(tokenizer: LLTokenizer, outline: Outline, source: Source) -> Checked:
    """Compile a grammar in this process, and follow an answer some way through it."""
    try:
        text = grammar_text(source)
    except (ValueError, RecursionError) as error:
        return Checked(reason=f"{tidy(str(error))}.")
    except MemoryError:
        return Checked(reason=TOO_LARGE)
    if source.kind == "json_schema" and (reason := rounded_value(source.schema)):
        return Checked(reason=reason)
    num_bytes = allocated_bytes()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if num_bytes is not None:
        num_bytes = (allocated_bytes() or 0) - num_bytes
    if matcher.is_error():
        reason = matcher.get_error()
        if source.kind == "json_schema":
            return Checked(reason=explain(reason, source.schema, source.strict))
        is_as_written = source.kind == "grammar" and text.startswith(source.text)
        return Checked(reason=f"{tidy(reason, source.text if is_as_written else '')}.")
    if source.whitespace not in ("", WHITESPACE) and _matches_more(tokenizer, source.whitespace):
        return Checked(reason=NOT_BLANK)
    if reason := walk(matcher, outline):
        return Checked(reason=reason)
    warnings = matcher.get_grammar_warnings()
    ignored = sorted({keyword for warning in warnings for keyword in ignored_keyword(warning)})
    if num_bytes is None:
        num_bytes = BYTES_PER_CHAR * len(text)
    return Checked(text, ignored_keywords=tuple(ignored), num_bytes=max(0, num_bytes))


class _Allocations(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int | None:
    """The memory that this process has allocated; None where the C library does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Allocations
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def _matches_more(tokenizer: LLTokenizer, pattern: str) -> bool:
    """Whether a regex matches a text with something else than the blanks of JSON."""
    others = f"start: OTHERS\nOTHERS: {inline_regex(pattern)} & ~/{BLANK}*/{OPTIONS}"
    matcher = LLMatcher(tokenizer, others, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.is_error()
