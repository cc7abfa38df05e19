"""The lines of a batch, as OpenAI's Batch API has them: requests, and their answers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minisgl.errors import one_of

METHODS, URLS = ("POST",), ("/v1/chat/completions", "/v1/completions")


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
    """The requests of a file, and its other lines; empty ones are left out."""
    requests: list[BatchRequest] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}  # the lines of the ids
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = _request(line)
                if (first := seen.setdefault(request.custom_id, number)) != number:
                    raise ValueError(f"custom_id {request.custom_id!r} is that of line {first}")
                requests.append(request)
            except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
                bad.append(BadLine(number, str(error)))
    return requests, bad


def _request(line: bytes) -> BatchRequest:
    """Raises ValueError with the reason for a line that is no request."""
    said = msgspec.json.decode(line, type=_Line)
    for name, given, allowed in (("method", said.method, METHODS), ("url", said.url, URLS)):
        if given not in allowed:
            raise ValueError(f"{name} is {given!r}; {one_of(allowed)}")
    body = bytes(said.body)
    if bytes(msgspec.json.decode(body, type=_Body).stream) == b"true":
        raise ValueError("body: stream cannot be true; an answer is one line")
    return BatchRequest(said.custom_id, said.url, body)


def take_answers(file: Path) -> dict[str, Answer]:
    """The final answers of an earlier run, by their custom ids.

    Other lines are taken out of the file: a last line that was not written to its end, and answers
    that another attempt may replace. Raises OSError.
    """
    if not file.exists():
        return {}
    kept: dict[str, Answer] = {}
    lines: list[bytes] = []
    is_whole = True
    with file.open("rb") as found:
        for line in found:
            answer = _answer(line)
            if answer is not None and answer.response is not None and answer.response.is_final:
                kept[answer.custom_id] = answer
                lines.append(line)
            else:
                is_whole = False
    if not is_whole:
        new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        new.write_bytes(b"".join(lines))
        os.replace(new, file)
    return kept


def _answer(line: bytes) -> Answer | None:
    try:
        return msgspec.json.decode(line, type=Answer) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


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
        yield f"and {len(bad) - most:,} more lines"
