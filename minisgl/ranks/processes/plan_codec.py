"""Encodes step plans as bytes, which rank 0 sends to the other ranks.

In steady decode a plan differs from the last one only in the number of the step, larger by one, and
the length of its longest row, larger by a run; it is sent as the single byte AGAIN. Other plans are
sent without their decode slots if these have not changed. In a pipeline, whose groups of rows take
turns, all this is in comparison with the plan as many steps before as there are stages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TypeVar

import msgspec

from minisgl.parts.host import PLANS
from minisgl.scheduler.plan import SlotJoin, StepPlan

AGAIN = b"\0"
SAMPLE = b"\2"  # the masks of the deferred plan that was sent last are filled
MOVE = b"\3"  # begins a message with a list of Move
CALL = b"\4"  # begins a message with the name of a call, and its arguments

Content = TypeVar("Content")

# (True if the decode slots are those of the last plan and therefore omitted, the plan without its
# parts, and these: the place of each in PLANS, and its content).
_Message = tuple[bool, StepPlan, list[tuple[int, msgspec.Raw]]]


class PlanEncoder:
    """Encodes all plans in launch order. A plan for which it raises must not be sent."""

    def __init__(self, num_stages: int = 1) -> None:
        self._plans = _last_plans(num_stages)
        self._msgpack = msgspec.msgpack.Encoder()

    def encode(self, plan: StepPlan) -> bytes:
        last = self._plans[0]
        same_batch = plan.decode_slots is last.decode_slots
        if (
            same_batch
            and not (plan.chunks or plan.joins or plan.grants)
            and plan.step == self._plans[-1].step + 1
            and plan.longest_decode == last.longest_decode + last.max_run
            and plan.epoch == last.epoch
            and plan.max_run == last.max_run
            and plan.parts == last.parts
            and plan.deferred == last.deferred
            and plan.lag == last.lag
        ):
            data = AGAIN
        else:
            slots = () if same_batch else plan.decode_slots
            joins = tuple(map(_without_text, plan.joins))
            parts = [
                (PLANS.index(type(part)), msgspec.Raw(self._msgpack.encode(part)))
                for part in plan.parts
            ]
            without = replace(plan, decode_slots=slots, joins=joins, parts=())
            message: _Message = same_batch, without, parts
            data = self._msgpack.encode(message)
        self._plans.append(plan)
        return data


def _last_plans(num_stages: int) -> deque[StepPlan]:
    """The last plans, before the first: the next one is compared with the first of these."""
    return deque([StepPlan(0, ())] * num_stages, num_stages)


def _without_text(join: SlotJoin) -> SlotJoin:
    """Remove the stop strings, which other ranks do not need and which may be invalid UTF-8."""
    return replace(join, params=replace(join.params, stop=())) if join.params.stop else join


def packed(kind: bytes, content: object) -> bytes:
    """A message of another kind than plans: MOVE or CALL."""
    return kind + msgspec.msgpack.encode(content)


def unpacked(data: bytes, content: type[Content]) -> Content:
    """The content, of this type, of what `packed` made."""
    return msgspec.msgpack.decode(data[1:], type=content)


class PlanDecoder:
    """Decodes the messages of one PlanEncoder, in order. Yields its plans without stop strings;
    unchanged decode slots are the same object."""

    def __init__(self, num_stages: int = 1) -> None:
        self._plans = _last_plans(num_stages)
        self._msgpack = msgspec.msgpack.Decoder(_Message)

    def decode(self, data: bytes) -> StepPlan:
        last = self._plans[0]
        if data == AGAIN:
            plan = StepPlan(
                step=self._plans[-1].step + 1,
                decode_slots=last.decode_slots,
                longest_decode=last.longest_decode + last.max_run,
                epoch=last.epoch,
                max_run=last.max_run,
                parts=last.parts,
                deferred=last.deferred,
                lag=last.lag,
            )
        else:
            same_batch, without, raw = self._msgpack.decode(data)
            slots = last.decode_slots if same_batch else without.decode_slots
            parts = (msgspec.msgpack.decode(content, type=PLANS[kind]) for kind, content in raw)
            plan = replace(without, decode_slots=slots, parts=tuple(parts))
        self._plans.append(plan)
        return plan
