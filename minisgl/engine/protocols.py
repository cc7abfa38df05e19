"""Interfaces between the engine and the runner that executes its plans."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from minisgl.errors import MinisglError
from minisgl.scheduler.plan import StepPlan, StepResult

Handle = TypeVar("Handle")


class Runner(Protocol[Handle]):
    """Executes plans: on one rank, on several, or not at all (in tests)."""

    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step and return at once. Called on the event loop."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Block until the step is done. Called on the engine's own thread, in launch order."""
        ...

    def may_compile(self) -> bool:
        """Whether a launched step may be compiling kernels, which takes its time."""
        ...

    def close(self) -> None: ...


class Ranks(Protocol):
    """The part of a tensor-parallel runner that watches over the other ranks."""

    @property
    def lost(self) -> Future[None]:
        """Raises when no step will end any more, where `collect` may not."""
        ...

    def silence(self) -> Mapping[int, float]:
        """Seconds since the last sign of life, by rank."""
        ...

    def give_up(self, reason: MinisglError) -> None:
        """Kill the others, and let `lost` raise. Returns at once."""
        ...
