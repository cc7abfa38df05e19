"""What the scheduler asks of a part: a feature that takes part in the steps of some requests.

A part has a host half, here, and a device half (parts/device_part.py). Its host half says what a
step does for it; that travels among `StepPlan.parts` to its device half, whose outcome comes back
at the same place of `StepResult.parts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from minisgl.errors import MinisglError
from minisgl.request import Extra, Request, SamplingParams
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import Running, StepWork

Failed = Iterable[tuple[Request, MinisglError]]  # requests to end, and why


class Part:
    """The host half of a part; each hook does nothing unless a part has something to do.

    All are called on the event loop. A part plans only while a request that runs is concerned, or
    always; the last steps that it planned may be settled after that.
    """

    # Of what requests ask of it. Those that ask concern it from their join until they leave, which
    # is when they end or are retracted. None: requests ask nothing of it.
    kind: ClassVar[type[Extra] | None] = None
    is_always: ClassVar[bool] = False  # it plans in every step

    def extra(
        self, params: SamplingParams, prompt: Sequence[int], given: Extra | None
    ) -> Extra | None:
        """What a new request asks of it, by its parameters and by what its caller gave besides.
        Raises InvalidRequestError."""
        return given

    def concerns(self, request: Request) -> bool:
        return self.kind is not None and request.extra(self.kind) is not None

    def admits(
        self, request: Request, running: Iterable[Running], barred: Collection[str] = ()
    ) -> bool:
        """Whether a request that concerns it may join the next plan; False: others may pass it, and
        it is asked again. running: those that run. barred: clients that may have no more join."""
        return True

    def holds(self, request: Request) -> bool:
        """Whether it keeps for a waiting request all that the request needs of it. Such a request
        may always join: otherwise one that needs what is kept would wait for it for ever."""
        return False

    @property
    def wants_step(self) -> bool:
        """Whether it has something for a step that computes nothing."""
        return False

    def plan(self, work: StepWork) -> PartPlan | None:
        """What a step does for it, of which all else is planned; None: nothing. May make the
        step's sampling wait (`StepWork.deferred`)."""
        return None

    def settle(self, work: StepWork, outcome: object) -> Failed | None:
        """Take the outcome of a step that did something for it, whose tokens are not settled yet.
        Some of the step's requests may have ended, or been retracted: these are not `active`.
        Returns the requests for which it failed, if there are any."""
        return None

    def failed(self, step: int) -> None:
        """Forget what this step and later ones were to do, which have failed."""

    def audit(self, running: Iterable[Running]) -> None:
        """Recompute what is kept; AssertionError if it is wrong."""
