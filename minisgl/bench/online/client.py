"""A streaming client: one connection, one request, and the arrival time of each event.

Nothing is decoded before the answer is complete, because that would be measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.client.address import Address
from minisgl.client.connection import connect, write_request
from minisgl.client.exchange import DONE, STREAM_BYTES, EventCutter, data_of

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class RecordedAnswer:
    """A recorded answer. Times are those of time.perf_counter."""

    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    redirect: str | None = None  # where it leads, if it does nothing else
    events: list[bytes] = field(default_factory=list)  # without the blank line between them
    times: list[float] = field(default_factory=list)  # [len(events)], of arrival
    rest: bytes = b""  # what is no event: all of an answer that is not streamed

    def payloads(self) -> Iterator[tuple[float, bytes]]:
        """The time and the JSON of each event except the last, [DONE]."""
        for at, event in zip(self.times, self.events, strict=True):
            data = data_of(event)
            if data and data != DONE:
                yield at, data

    def chunks(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The time and the decoded JSON of each event."""
        for at, data in self.payloads():
            yield at, _decode(data)

    @property
    def body(self) -> bytes:
        """All of an answer that is not streamed."""
        return b"\n\n".join([*self.events, self.rest])

    @property
    def done(self) -> bool:
        return any(data_of(event) == DONE for event in self.events[-1:])


@dataclass(slots=True)
class RunProgress:
    """The progress of a run, read by the live line and by its outlook."""

    num_ended: int = 0
    num_running: int = 0
    num_received: int = 0  # tokens or events so far
    # Of the requests with a whole answer: how many, the tokens asked for, the events that came.
    num_answered: int = 0
    num_answered_tokens: int = 0
    num_answered_events: int = 0


async def post(
    address: Address,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    progress: RunProgress | None = None,
    max_bytes: int = STREAM_BYTES,
) -> RecordedAnswer:
    """Send JSON and wait for the whole answer. Raises OSError where the connection breaks."""
    json = {"content-type": "application/json", **(headers or {})}
    answer = RecordedAnswer()
    progress = progress or RunProgress()
    cutter = EventCutter(max_bytes)

    def take(piece: bytes, now: float) -> None:
        events = cutter.cut(piece)
        answer.events += events
        answer.times += [now] * len(events)
        progress.num_received += len(events)

    connection = await connect(address, write_request("POST", address, json, body), take)
    try:
        await connection.finished
        answer.ended = time.perf_counter()
    finally:
        connection.close()
    head = connection.head.result()
    answer.sent, answer.status, answer.redirect = connection.sent, head.status, head.redirect
    answer.rest = cutter.rest
    return answer
