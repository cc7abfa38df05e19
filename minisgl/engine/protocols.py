"""Interfaces between the engine and the runner that executes its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from minisgl.distributed.addresses import Listening
from minisgl.kvcache.copies import HostTraffic
from minisgl.kvcache.moves import Done, Move
from minisgl.matcher import MaskRows
from minisgl.scheduler.plan import StepPlan, StepResult

Handle = TypeVar("Handle")


class Runner(Protocol[Handle]):
    """Executes plans: on one rank, on several, or as a fake in tests."""

    def launch(self, plan: StepPlan, masks: MaskRows | None = None) -> Handle:
        """Queue one step and return at once. Called on the event loop.

        masks: from `new_masks`, filled; None for a plan without masks, and for a deferred one: of
        that only the forward pass is queued.
        """

    def new_masks(self, step: int, num_rows: int) -> MaskRows:
        """Memory for the masks of a step, to be filled and passed on.

        It must not be written once it was passed on. Called at most once for a step.
        """

    def sample(self, handle: Handle, masks: MaskRows) -> None:
        """Queue the rest of a deferred plan, the last one that was launched, and return at once.

        If it does not follow, because an earlier step has failed, the plan is forgotten.
        """

    def collect(self, handle: Handle) -> StepResult:
        """Block until the step is done. Called on the engine's own thread, in launch order."""

    def loads(self, handle: Handle) -> Iterator[int]:
        """Block for each load that a launched plan carries, and yield its id.

        Called on a thread of its own, in launch order, for plans with loads.
        """

    def move(self, moves: Sequence[Move], done: Done) -> None:
        """Begin moves, after the launched plans and their copies. Returns at once.

        done: called on any thread with the id of each, and the number of pages, from its first on,
        that every rank has moved. Raises EngineStoppedError.
        """

    def listen(self, address: str, token: bytes) -> Listening:
        """Let every rank take part in moves between engines, before any of them is begun.

        address: of the engine; token: of the cluster. Blocks; called on any thread. Raises OSError
        or EngineStoppedError.
        """

    def traffic(self) -> HostTraffic | None:
        """The copies to and from host memory so far; None without a host cache."""

    def may_compile(self) -> bool:
        """True while a launched step may be compiling kernels, which can take minutes."""

    def close(self) -> None: ...
