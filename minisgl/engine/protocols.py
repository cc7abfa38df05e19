"""Interfaces between the engine and the runner that executes its plans."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from minisgl.errors import MinisglError
from minisgl.scheduler.plan import StepPlan, StepResult

Handle = TypeVar("Handle")


class Runner(Protocol[Handle]):
    """Executes plans: on one rank, on several, or as a fake in tests."""

    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step and return at once. Called on the event loop."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Block until the step is done. Called on the engine's own thread, in launch order."""
        ...

    def may_compile(self) -> bool:
        """True while a launched step may be compiling kernels, which can take minutes."""
        ...

    def close(self) -> None: ...


class Ranks(Protocol):
    """The part of a tensor-parallel runner that monitors the other ranks."""

    @property
    def lost(self) -> Future[None]:
        """A future that fails once no step will end any more, even where `collect` hangs."""
        ...

    def silence(self) -> Mapping[int, float]:
        """Seconds since the last heartbeat, by rank."""
        ...

    def give_up(self, reason: MinisglError) -> None:
        """Kill the other ranks and fail `lost` with `reason`. Returns at once."""
        ...
