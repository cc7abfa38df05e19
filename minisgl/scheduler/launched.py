"""A step from its launch to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.request import Request
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.state import StepWork


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan in flight, the requests of its rows, and who planned each of its parts."""

    plan: StepPlan
    work: StepWork
    parts: Sequence[Part] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The changes made by a step. A finished request is also in `progressed` if it got a token."""

    progressed: list[Request]  # requests with new tokens
    num_tokens: list[int]  # number of new tokens of each of `progressed`
    finished: list[Request]
    launched: Launched
