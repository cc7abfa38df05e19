"""Step plans as bytes, from rank 0 to the others.

In steady decode only the step's number and its longest row differ from the plan before, both by
one, and a message is one byte: again. Where pages or chunks come in, the batch is still not sent
again; a new batch is its slots.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from minisgl.scheduler.plan import SlotJoin, StepPlan

AGAIN = b"\0"

# A plan's decode slots are empty where those of the last plan stay.
_Message = tuple[bool, StepPlan]


class PlanEncoder:
    """`encode` every plan, in the order of launch. What it raises for is not sent."""

    def __init__(self) -> None:
        self._last = StepPlan(0, ())
        self._msgpack = msgspec.msgpack.Encoder()

    def encode(self, plan: StepPlan) -> bytes:
        last = self._last
        same_batch = plan.decode_slots is last.decode_slots
        if (
            same_batch
            and not (plan.chunks or plan.joins or plan.grants)
            and plan.step == last.step + 1
            and plan.longest_decode == last.longest_decode + 1
            and plan.epoch == last.epoch
            and plan.max_run == last.max_run
        ):
            data = AGAIN
        else:
            slots = () if same_batch else plan.decode_slots
            joins = tuple(map(_without_text, plan.joins))
            message: _Message = same_batch, replace(plan, decode_slots=slots, joins=joins)
            data = self._msgpack.encode(message)
        self._last = plan
        return data


def _without_text(join: SlotJoin) -> SlotJoin:
    """Ranks do not look for stop strings, and a string of Python's may be none of UTF-8."""
    return replace(join, params=replace(join.params, stop=())) if join.params.stop else join


class PlanDecoder:
    """Gives back what the other end's PlanEncoder was given, but for stop strings; the batch as the
    same object if it is the same."""

    def __init__(self) -> None:
        self._last = StepPlan(0, ())
        self._msgpack = msgspec.msgpack.Decoder(_Message)

    def decode(self, data: bytes) -> StepPlan:
        last = self._last
        if data == AGAIN:
            plan = StepPlan(
                step=last.step + 1,
                decode_slots=last.decode_slots,
                longest_decode=last.longest_decode + 1,
                epoch=last.epoch,
                max_run=last.max_run,
            )
        else:
            same_batch, plan = self._msgpack.decode(data)
            if same_batch:
                plan = replace(plan, decode_slots=last.decode_slots)
        self._last = plan
        return plan
