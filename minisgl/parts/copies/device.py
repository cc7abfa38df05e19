"""The runner's half: queues the copies of a step."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.device.copy_lanes import CopyMark
from minisgl.parts.copies.host import CopyPlan
from minisgl.parts.device_part import StepPart
from minisgl.tiers.host.host_copies import HostCopies


class CopyStep(StepPart):
    def __init__(self, host: HostCopies, rank: int, plan: CopyPlan) -> None:
        """rank: this one, of those that divide the requests."""
        self._host = host
        self._copies = plan.of_ranks[rank]
        self._loads: dict[int, CopyMark] = {}  # their ends, by id

    def begin(self) -> None:
        self._queue_loads = self._host.queue(self._copies)

    def end(self) -> None:
        self._loads = self._queue_loads()

    def follow(self) -> Iterator[int]:
        for load_id, mark in self._loads.items():
            mark.wait()
            yield load_id
