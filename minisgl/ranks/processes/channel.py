"""Carries messages between rank 0 and the other ranks.

    rank 0   ── plans, moves, calls, close ───▶  rank
             ◀── Ready, Failed ────────────────
             ◀── Answered, RankMoved ──────────
             ◀── Landed, Encoded ──────────────
             ◀── heartbeats ───────────────────

Ranks on one machine use pipes, and shared memory for the heartbeats. For ranks on other machines
see ranks/nodes/.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from minisgl.errors import MinisglError
from minisgl.ranks.processes.mask_ring import MaskRing, StepMasks

HEARTBEAT_S = 1.0
_CLOSE = b"\1"  # sent after the last plan

T = TypeVar("T")
Waitable = Connection | int  # what multiprocessing.connection.wait accepts


class Ready(Struct, frozen=True, tag=True):
    """Sent once a rank, or all ranks of a node, have loaded the model and accept plans."""


class Failed(Struct, frozen=True, tag=True):
    """The last message of a rank or a node that cannot go on."""

    kind: str  # class name of the error
    reason: str


@dataclass(frozen=True, slots=True)
class RankMoved:
    """Sent at the end of a move."""

    move: int
    num_pages: int  # from the first on, that are done


class Landed(Struct, frozen=True, tag=True):
    """Sent when a load has landed on the only rank that has its pages."""

    load: int


class Encoded(Struct, frozen=True, tag=True):
    """Sent when the encoding of an image has ended on a rank."""

    number: int
    why: str  # it failed, or ""


class Answered(Struct, frozen=True, tag=True):
    """Sent when a call has ended on a rank."""

    rank: int
    result: bytes = b""  # in MessagePack
    obstacle: str = ""  # why there is none
    kind: str = ""  # class name of the error

    def value(self, kind: type[T], refusal: Callable[[str], Exception]) -> T:
        """The result. Raises what `refusal` makes of the obstacle, if there is one."""
        if self.obstacle:
            raise refusal(self.obstacle)
        return msgspec.msgpack.decode(self.result, type=kind)


Message = Ready | Failed | RankMoved | Landed | Encoded | Answered


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a rank other than 0. Can be pickled only while its process is being spawned."""

    rank: int
    connection: Connection
    heartbeats: Any  # shared memory: time.monotonic of the last heartbeat, by rank
    masks: MaskRing  # rank 0 fills those of a plan before it sends what asks for them

    def receive(self) -> bytes | None:
        """Block until the next plan; None if there are no more. Raises EOFError if rank 0 has
        died."""
        data = self.connection.recv_bytes()
        return None if data == _CLOSE else data

    def report(self, message: Message) -> None:
        """Send `message` to rank 0. Raises OSError if the connection is closed."""
        self.connection.send(message)

    def beat(self) -> None:
        """Send a heartbeat, expected every HEARTBEAT_S seconds. Any thread may call it."""
        self.heartbeats[self.rank] = time.monotonic()


class Channel:
    """Rank 0's end for the ranks of its machine. One thread receives; any thread may send, one at a
    time."""

    def __init__(self, ranks: Iterable[int], context: SpawnContext, masks: MaskRing) -> None:
        """ranks: the ranks other than 0. context: of the processes that inherit the other ends.
        masks: which every rank finds there."""
        self.masks = masks
        pipes = {rank: context.Pipe() for rank in ranks}
        self._heartbeats = context.RawArray("d", max(pipes, default=0) + 1)
        self._connections = {rank: here for rank, (here, _) in pipes.items()}
        self._open = dict(self._connections)
        self._far_ends = {rank: there for rank, (_, there) in pipes.items()}

    def end_of(self, rank: int) -> RankEnd:
        """The other end, to be passed to the rank when it is launched."""
        return RankEnd(rank, self._far_ends[rank], self._heartbeats, self.masks)

    def launched(self) -> None:
        """Release this process's copies of the other ends, once all ranks are started: a pipe
        reaches EOF only when no process holds the other end open."""
        for end in self._far_ends.values():
            end.close()

    def send(self, data: bytes, masks: StepMasks | None = None) -> None:
        """Send an encoded plan to every rank, with the masks that it asks for, from `masks`. Raises
        OSError if a connection is closed."""
        # Ranks read promptly, so this does not block. They share the memory of the masks.
        for connection in self._connections.values():
            connection.send_bytes(data)

    def send_close(self) -> None:
        """Announce the end of the plans to every rank whose connection is open."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # that rank has already ended
                connection.send_bytes(_CLOSE)

    def receive(
        self, timeout_s: float, wakers: Sequence[Waitable] = ()
    ) -> list[tuple[int, Message | None]]:
        """Wait until a rank sends something or one of `wakers` is ready, up to `timeout_s`.

        Returns (rank, message) pairs, at most one per rank; the message is None, once, for a rank
        whose connection is closed because its process has ended.
        """
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
        """A number for each rank that changes with each of its heartbeats."""
        return {rank: self._heartbeats[rank] for rank in self._connections}

    def broken(self) -> MinisglError | None:
        """Why the ranks of another machine cannot go on; None while they can."""
        return None

    def send_failure(self, reason: MinisglError) -> None:
        """Tell other machines why the ranks are about to be killed. Returns soon, and never
        raises."""
