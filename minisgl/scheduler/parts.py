"""What the scheduler asks of a part: a feature that takes part in the steps of some requests.

A part has a host half, here, and a device half (parts/device_part.py). Its host half says what a
step does for it; that travels among `StepPlan.parts` to its device half, whose outcome comes back
at the same place of `StepResult.parts`.
"""

from __future__ import annotations

from minisgl.request import Request
from minisgl.scheduler.plan import PartPlan
from minisgl.scheduler.state import StepWork


class Part:
    """The host half of a part; each hook does nothing unless a part has something to do.

    All are called on the event loop. A part plans only while a request that runs is concerned, or
    always; the last steps that it planned may be settled after that.
    """

    always = False  # concerned in every step, not by requests

    def concerns(self, request: Request) -> bool:
        """Whether a request has to do with it, from its join until it leaves: ends or is retracted.
        The answer must stay the same."""
        return False

    def plan(self, work: StepWork) -> PartPlan | None:
        """What a step does for it, of which all else is planned; None: nothing. May make the
        step's sampling wait (`StepWork.deferred`)."""
        return None

    def settle(self, work: StepWork, outcome: object) -> None:
        """Take the outcome of a step that did something for it, whose tokens are not settled yet.
        Some of the step's requests may have ended, or been retracted: these are not `active`."""

    def retracted(self, request: Request) -> None:
        """Forget what steps have computed of a request, which begins anew."""
