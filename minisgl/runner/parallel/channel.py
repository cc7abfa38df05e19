"""Messages between rank 0 and the other ranks.

    rank 0   ── plans, close ─────────────▶  rank
             ◀── RankReady, RankFailed ────
             ◀── heartbeats ───────────────

`Channel` is rank 0's end, which serves all other ranks; `RankEnd` is the end of one of them. Ranks
on one machine use pipes and a piece of shared memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, Protocol

HEARTBEAT_S = 1.0
_CLOSE = b"\1"  # in place of a plan: there are no more

Waitable = Connection | int  # what multiprocessing.connection.wait accepts


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank has loaded its part of the model and waits for plans."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The reason why the rank ends."""

    kind: str  # class name of the error
    message: str


Message = RankReady | RankFailed


class RankEnd(Protocol):
    """The end of a rank other than 0. Whoever launches the rank carries it there."""

    def receive(self) -> bytes | None:
        """Block until the next plan; None if there are no more. Raises EOFError once rank 0 is
        gone."""
        ...

    def report(self, message: Message) -> None:
        """Raises OSError if rank 0 cannot be reached."""
        ...

    def beat(self) -> None:
        """Give a sign of life, as expected every HEARTBEAT_S seconds. Any thread may call it."""
        ...


class Channel(Protocol):
    """Rank 0's end. One thread receives; any may send, one at a time."""

    def end_of(self, rank: int) -> RankEnd:
        """The other end, to be carried to the rank when it is launched."""
        ...

    def launched(self) -> None:
        """Release what this process holds of the other ends, now that all ranks have theirs."""
        ...

    def send(self, data: bytes) -> None:
        """Send an encoded plan to every rank. Raises OSError if one cannot be reached."""
        ...

    def send_close(self) -> None:
        """Announce that there are no more plans, to every rank that can still be reached."""
        ...

    def receive(
        self, timeout_s: float, wakers: Sequence[Waitable] = ()
    ) -> list[tuple[int, Message | None]]:
        """Wait until a rank sends something or one of `wakers` is ready, up to `timeout_s`.

        Returns at most one message of each rank, and once None for a rank whose connection is
        closed, which only the end of the rank does.
        """
        ...

    def heartbeats(self) -> Mapping[int, float]:
        """For each rank a number that changes with each of its heartbeats."""
        ...


class PipeChannel:
    """To processes on this machine: a pipe for each, and their heartbeats in shared memory."""

    def __init__(self, ranks: Iterable[int], context: SpawnContext) -> None:
        """ranks: the other ranks. context: of the processes that inherit the other ends."""
        pipes = {rank: context.Pipe() for rank in ranks}
        self._heartbeats = context.RawArray("d", max(pipes) + 1)
        self._connections = {rank: here for rank, (here, _) in pipes.items()}
        self._open = dict(self._connections)
        self._far_ends = {rank: there for rank, (_, there) in pipes.items()}

    def end_of(self, rank: int) -> PipeEnd:
        return PipeEnd(rank, self._far_ends[rank], self._heartbeats)

    def launched(self) -> None:
        # A pipe reports its end only when no process holds the far end open.
        for end in self._far_ends.values():
            end.close()

    def send(self, data: bytes) -> None:
        # A rank does little but read, so this does not block.
        for connection in self._connections.values():
            connection.send_bytes(data)

    def send_close(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # that rank has ended already
                connection.send_bytes(_CLOSE)

    def receive(
        self, timeout_s: float, wakers: Sequence[Waitable] = ()
    ) -> list[tuple[int, Message | None]]:
        ready = wait([*self._open.values(), *wakers], timeout_s)
        received: list[tuple[int, Message | None]] = []
        for rank in [rank for rank, connection in self._open.items() if connection in ready]:
            try:
                received.append((rank, self._open[rank].recv()))
            except (EOFError, OSError):
                del self._open[rank]
                received.append((rank, None))
        return received

    def heartbeats(self) -> Mapping[int, float]:
        return {rank: self._heartbeats[rank] for rank in self._connections}


@dataclass(frozen=True, slots=True)
class PipeEnd:
    """Can be pickled only while a process is being spawned."""

    rank: int
    connection: Connection
    heartbeats: Any  # shared, indexed by rank: the time.monotonic of the last heartbeat

    def receive(self) -> bytes | None:
        data = self.connection.recv_bytes()
        return None if data == _CLOSE else data

    def report(self, message: Message) -> None:
        self.connection.send(message)

    def beat(self) -> None:
        self.heartbeats[self.rank] = time.monotonic()
