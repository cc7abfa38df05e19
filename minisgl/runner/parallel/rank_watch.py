"""Judges whether the other ranks still work, from what is seen of them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from minisgl.errors import (
    CheckpointError,
    DeviceMemoryError,
    EngineStoppedError,
    MinisglError,
)
from minisgl.runner.parallel.channel import HEARTBEAT_S, Message, RankFailed, RankReady
from minisgl.runner.parallel.launcher import ProcessState

# A process that runs never misses heartbeats for this long, whatever it does.
SILENCE_LIMIT_S = 120.0

_LOAD_ERRORS = {kind.__name__: kind for kind in (CheckpointError, DeviceMemoryError)}


def error_of(kind: str) -> type[MinisglError]:
    """The class for a rank's error of this class name: errors of loading keep theirs."""
    return _LOAD_ERRORS.get(kind, EngineStoppedError)


class RankWatch:
    """Starts no thread and reads no clock: `heard` and `look` are fed by one thread.

    num_launched and num_collected, steps of rank 0, are counted by other threads.
    """

    def __init__(self, ranks: Iterable[int], step_timeout_s: float) -> None:
        self.silence = dict.fromkeys(ranks, 0.0)  # seconds without a heartbeat, by rank
        self.ready: set[int] = set()
        self.num_launched = self.num_collected = 0
        self._step_timeout_s = step_timeout_s
        self._failed: dict[int, RankFailed] = {}
        self._disconnected: set[int] = set()
        self._looked_s = 0.0
        self._heartbeats = dict.fromkeys(self.silence, 0.0)  # as of that time
        self._step = 0  # the one waited for at that time
        self._waited_s = 0.0  # for that step

    def begin(self, now: float) -> None:
        """Count silence from `now`, in seconds of time.monotonic, as in `look`."""
        self._looked_s = now

    def heard(self, rank: int, message: Message | None) -> None:
        """Take note of what Channel.receive has returned."""
        if message is None:
            self._disconnected.add(rank)
        elif isinstance(message, RankFailed):
            self._failed[rank] = message
        elif isinstance(message, RankReady):
            self.ready.add(rank)

    def look(self, now: float, heartbeats: Mapping[int, float]) -> None:
        """Update `silence`; to be called every HEARTBEAT_S seconds.

        A late look counts at most twice that: this process may have been stopped itself.
        """
        elapsed, self._looked_s = min(now - self._looked_s, 2 * HEARTBEAT_S), now
        for rank in self.silence:
            last, self._heartbeats[rank] = self._heartbeats[rank], heartbeats[rank]
            same_beat = last == heartbeats[rank]
            self.silence[rank] = self.silence[rank] + elapsed if same_beat else 0.0
        step = self.num_collected + 1
        same_step = step == self._step and self.num_launched >= step
        self._step, self._waited_s = step, self._waited_s + elapsed if same_step else 0.0

    def verdict(self, states: Mapping[int, ProcessState]) -> MinisglError | None:
        """Why the ranks cannot go on; None while they can."""
        for rank, state in states.items():
            ended = state.exit_code is not None or rank in self._disconnected
            if ended and rank not in self._failed:
                return EngineStoppedError(
                    f"Rank {rank} (process {state.pid}) {_end_of(state.exit_code)}."
                )
        for rank, failed in self._failed.items():
            return error_of(failed.kind)(f"Rank {rank} failed: {failed.message}")
        for rank, silence in self.silence.items():
            if silence > SILENCE_LIMIT_S or min(silence, self._waited_s) > self._step_timeout_s:
                return EngineStoppedError(
                    f"Rank {rank} (process {states[rank].pid}) has given no sign of life for "
                    f"{silence:.0f} s."
                )
        return None


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "is ending"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}; it may have printed why"
