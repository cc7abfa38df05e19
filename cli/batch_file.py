"""The lines of a batch, as OpenAI's Batch API has them: requests, and their answers."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from minisgl.errors import ConfigError, MinisglError, one_of
from minisgl.printable import counted

METHODS, URLS = ("POST",), ("/v1/chat/completions", "/v1/completions")
ANSWER_BEGINS = b'{"id":"batch_req_'


class _Line(msgspec.Struct):
    """A request, as it is in the file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"false")


class Response(msgspec.Struct):
    """What a server has answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw

    @property
    def is_final(self) -> bool:
        """Whether the same request would be answered in the same way again."""
        return self.status_code < 500 and self.status_code != 429


class Failure(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class Answer(msgspec.Struct):
    """A line of the output: `response` or `error` is None."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None


class OutputError(MinisglError):
    """OUT.jsonl takes no more."""

    def __init__(self, file: Path, error: OSError) -> None:
        super().__init__(
            f"OUT.jsonl {file}: cannot be written ({error.strerror}); the same command goes on "
            "after its last whole line."
        )


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request."""

    number: int  # from 1 on
    reason: str


def read_requests(file: Path) -> tuple[list[BatchRequest], list[BadLine]]:
    """The requests of a file, and its other lines; empty ones are left out. Raises ConfigError."""
    requests: list[BatchRequest] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}  # the lines of the ids
    with _opened(file, "IN.jsonl", "rb", "read") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
                if b"\0" in line[:4]:  # of the two or four bytes of a brace or of a mark
                    raise ConfigError("IN.jsonl", file, "is UTF-16 or UTF-32; allowed: UTF-8")
            if not line.strip():
                continue
            try:
                request = _request(line)
                if (first := seen.setdefault(request.custom_id, number)) != number:
                    raise ValueError(f"custom_id {request.custom_id!r} is that of line {first}")
                requests.append(request)
            except UnicodeDecodeError:
                bad.append(BadLine(number, "is not in UTF-8; save the file in UTF-8"))
            except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
                bad.append(BadLine(number, str(error)))
    return requests, bad


def _request(line: bytes) -> BatchRequest:
    """Raises ValueError with the reason for a line that is no request."""
    said = msgspec.json.decode(line.decode(), type=_Line)  # msgspec itself passes raw bodies on
    for name, given, allowed in (("method", said.method, METHODS), ("url", said.url, URLS)):
        if given not in allowed:
            raise ValueError(f"{name} is {given!r}; {one_of(allowed)}")
    body = bytes(said.body)
    if bytes(msgspec.json.decode(body, type=_Body).stream) == b"true":
        raise ValueError("body: stream cannot be true; an answer is one line")
    return BatchRequest(said.custom_id, said.url, body)


@contextmanager
def answers_in(
    file: Path, asked: Collection[str] = ()
) -> Iterator[tuple[Callable[[bytes], None], dict[str, int]]]:
    """A function that adds a line, and the statuses of the file's final answers, by custom id.

    asked: the custom ids of this run. No other run may write to the file meanwhile. Two kinds of
    lines are taken out of it: a last one that was not written to its end, and answers to what is
    asked again that another attempt may replace. Raises ConfigError for a file of something else,
    which stays as it is; it and the function raise OutputError where the file takes no more.
    """
    with _opened(file, "OUT.jsonl", "a+b", "written") as out:
        _lock(out, file)
        out.seek(0)
        lines: list[bytes] = []
        statuses: dict[str, int] = {}
        for number, line in enumerate(out, 1):
            bare = line.removeprefix(BOM_UTF8) if number == 1 else line
            answer = _answer(bare)
            if answer is None:
                if not _is_torn(bare):
                    allowed = f"line {number} is no answer; allowed: a new file, or one of answers"
                    raise ConfigError("OUT.jsonl", file, allowed)
                continue
            if answer.response is not None and answer.response.is_final:
                statuses[answer.custom_id] = answer.response.status_code
            elif answer.custom_id in asked:
                continue
            lines.append(line.removesuffix(b"\n") + b"\n")
        kept = b"".join(lines)
        if len(kept) != out.tell():
            with _written(file):
                _rewrite(file, kept)
        yield partial(_add, out, file), statuses


def _opened(file: Path, name: str, mode: str, done: str) -> IO[bytes]:
    """The file that the argument `name` says. Raises ConfigError."""
    try:
        return file.open(mode)
    except OSError as error:
        raise ConfigError(name, file, f"cannot be {done} ({error.strerror})") from error


def _add(out: IO[bytes], file: Path, line: bytes) -> None:
    with _written(file):
        while line:  # without a buffer, which closing the file would write again
            line = line[os.write(out.fileno(), line) :]


@contextmanager
def _written(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(file, error) from error


def _lock(out: IO[bytes], file: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        allowed = "another run writes to it; allowed: another file, or the same one after that run"
        raise ConfigError("OUT.jsonl", file, allowed) from None
    except OSError:  # a file system without locks
        pass


def _answer(line: bytes) -> Answer | None:
    try:
        return msgspec.json.decode(line, type=Answer)
    except (ValueError, RecursionError):
        return None


def _is_torn(line: bytes) -> bool:
    """Whether a line is the beginning of an answer, or empty."""
    begun = line.replace(b" ", b"")[: len(ANSWER_BEGINS)]
    return not line.strip() or (not line.endswith(b"\n") and ANSWER_BEGINS.startswith(begun))


def _rewrite(file: Path, content: bytes) -> None:
    """Write the file anew in its place, which keeps its links, owner and mode.

    If that is interrupted, the content is in another file beside it.
    """
    descriptor, copy = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with open(descriptor, "wb") as safe:
            safe.write(content)
    except OSError:  # a full disk
        os.unlink(copy)
        raise
    with file.open("r+b") as again:
        again.write(content)
        again.truncate()
    os.unlink(copy)


def answer_line(request: BatchRequest, result: Response | Failure) -> bytes:
    """The line of the output for a request."""
    response = result if isinstance(result, Response) else None
    error = result if isinstance(result, Failure) else None
    answer = Answer(f"batch_req_{secrets.token_hex(12)}", request.custom_id, response, error)
    return msgspec.json.encode(answer) + b"\n"


def described(bad: Sequence[BadLine], most: int = 20) -> Iterator[str]:
    """What to say of lines that are no requests."""
    for line in bad[:most]:
        yield f"line {line.number}: {line.reason}"
    if len(bad) > most:
        yield f"and {counted(len(bad) - most, 'more line')}"
