"""Decides from messages, heartbeats and process states whether the other ranks still work."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from minisgl.errors import (
    CheckpointError,
    DeviceMemoryError,
    EngineStoppedError,
    MinisglError,
)
from minisgl.ranks.processes.channel import HEARTBEAT_S, Failed, Message, Ready
from minisgl.ranks.processes.launcher import UNGUARDED, UNGUARDED_REASON, ProcessState

# No running process is silent for this long, whatever it computes.
SILENCE_LIMIT_S = 120.0

_LOAD_ERRORS = {kind.__name__: kind for kind in (CheckpointError, DeviceMemoryError)}


def error_of(kind: str, other: type[MinisglError] = EngineStoppedError) -> type[MinisglError]:
    """The class to raise for a rank's error; loading errors keep their class, given by name."""
    return _LOAD_ERRORS.get(kind, other)


class RankWatch:
    """Judges the other ranks. Starts no thread and reads no clock; one thread calls its methods.

    num_launched and num_collected count the steps of rank 0; other threads increment them.
    """

    def __init__(self, ranks: Iterable[int], step_timeout_s: float) -> None:
        self.silence = dict.fromkeys(ranks, 0.0)  # seconds without a heartbeat, by rank
        self.ready: set[int] = set()
        self.num_launched = self.num_collected = 0
        self._step_timeout_s = step_timeout_s
        self._failed: dict[int, Failed] = {}
        self._disconnected: set[int] = set()
        self._looked_s = 0.0
        self._heartbeats = dict.fromkeys(self.silence, 0.0)  # at the last look
        self._step = 0  # the step in flight at the last look
        self._waited_s = 0.0  # time spent waiting for that step

    def begin(self, now: float) -> None:
        """Start to measure silence. now: time.monotonic."""
        self._looked_s = now

    def heard(self, rank: int, message: Message | None) -> None:
        """Record a message that Channel.receive returned."""
        if message is None:
            self._disconnected.add(rank)
        elif isinstance(message, Failed):
            self._failed[rank] = message
        elif isinstance(message, Ready):
            self.ready.add(rank)

    def look(self, now: float, heartbeats: Mapping[int, float]) -> None:
        """Update `silence`; must be called every HEARTBEAT_S seconds.

        A late call counts for at most twice that, because this process may have been stopped.
        """
        elapsed, self._looked_s = min(now - self._looked_s, 2 * HEARTBEAT_S), now
        for rank in self.silence:
            last, self._heartbeats[rank] = self._heartbeats[rank], heartbeats[rank]
            same_beat = last == heartbeats[rank]
            self.silence[rank] = self.silence[rank] + elapsed if same_beat else 0.0
        step = self.num_collected + 1
        same_step = step == self._step and self.num_launched >= step
        self._step, self._waited_s = step, self._waited_s + elapsed if same_step else 0.0

    def knows_cause(
        self, states: Mapping[int, ProcessState], broken: MinisglError | None = None
    ) -> bool:
        """Whether the verdict is more than what may follow from an end that is not seen yet."""
        killed = (_distance_from_cause(states[rank].exit_code) == 0 for rank in self._ended(states))
        return broken is not None or any(killed)

    def verdict(
        self, states: Mapping[int, ProcessState], broken: MinisglError | None = None
    ) -> MinisglError | None:
        """The error because of which the ranks cannot go on; None while they can.

        broken: why those of another machine cannot. It counts less than the end of a process here,
        which may have led to it, and more than an error here, to which it may have led. Of
        processes that have ended, one that was killed counts most: the others lose their neighbour.
        """
        if ended := self._ended(states):
            rank = min(ended, key=lambda rank: _distance_from_cause(states[rank].exit_code))
            state = states[rank]
            return EngineStoppedError(
                f"Rank {rank} (process {state.pid}) {_end_of(state.exit_code)}."
            )
        if broken is not None:
            return broken
        for rank, failed in self._failed.items():
            return error_of(failed.kind)(f"Rank {rank} failed: {failed.reason}")
        for rank, silence in self.silence.items():
            if silence > SILENCE_LIMIT_S or min(silence, self._waited_s) > self._step_timeout_s:
                # Of a rank on another machine the process is not known.
                process = f" (process {states[rank].pid})" if rank in states else ""
                return EngineStoppedError(
                    f"Rank {rank}{process} has given no sign of life for {silence:.0f} s."
                )
        return None

    def _ended(self, states: Mapping[int, ProcessState]) -> list[int]:
        """The ranks whose processes end without a word."""
        return [
            rank
            for rank, state in states.items()
            if rank not in self._failed
            and (state.exit_code is not None or rank in self._disconnected)
        ]


def _distance_from_cause(exit_code: int | None) -> int:
    """A small number for an end that has its cause outside; SIGABRT is most often a library's own,
    when it has lost its peer."""
    if exit_code is None:
        return 3
    if exit_code >= 0:
        return 2
    return int(exit_code == -signal.SIGABRT)


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "is ending"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == UNGUARDED:
        return f"has ended: {UNGUARDED_REASON}"
    return f"ended with exit code {exit_code}; it may have printed why"
