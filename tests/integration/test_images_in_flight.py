"""Requests whose images the device has not encoded yet: which steps wait for a tower, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.image_cases import LLAVA, PARAMS, QWEN, image_case, is_right, started, submitted

from minisgl.device.copy_lanes import CopyMark, HostCopyLane, Mark
from minisgl.parts.images import device
from minisgl.parts.images.host import ImagePlan
from minisgl.runner.runner import ModelRunner
from minisgl.scheduler.plan import StepPlan

LATER = 6  # steps that ask whether a tower has ended, before it has


class _Later:
    """The end of a tower's work that the device reaches later, or once a step waits for it."""

    def __init__(self) -> None:
        self.num_asked, self.is_held, self.is_waited_for = 0, False, False

    def wait(self) -> None:
        self.is_waited_for = True

    def is_reached(self) -> bool:
        self.num_asked += 1
        return self.num_asked > LATER

    def seconds(self) -> float:
        return 0.0


class LateLane(HostCopyLane):
    """As that of a GPU, whose work is queued when the host goes on."""

    def __init__(self) -> None:
        self.marks: list[_Later] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether the host has waited for a tower."""
        return any(mark.is_waited_for for mark in self.marks)

    def queue(self, work: Callable[[], None], after: Sequence[Mark]) -> CopyMark:
        work()
        self.marks.append(_Later())
        return self.marks[-1]

    def hold_compute(self, mark: CopyMark) -> None:
        assert isinstance(mark, _Later)
        mark.is_held = True


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    made = LateLane()
    monkeypatch.setattr(device, "copy_lane", lambda *_, **__: made)
    return made


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    found: list[StepPlan] = []
    launch = ModelRunner.launch

    def noting(self: ModelRunner, plan: StepPlan, masks: Any = None) -> Any:
        found.append(plan)
        return launch(self, plan, masks)

    monkeypatch.setattr(ModelRunner, "launch", noting)
    return found


def first_with_chunks(plans: Sequence[StepPlan]) -> int:
    return next(number for number, plan in enumerate(plans) if plan.chunks)


@pytest.mark.parametrize("architecture", [LLAVA, QWEN])
def test_a_request_alone_is_queued_behind_its_tower(
    architecture: str, lane: LateLane, launched: list[StepPlan]
) -> None:
    asked = image_case(architecture).asked[0]

    async def run() -> None:
        async with started(architecture) as engine:
            assert is_right(asked, await submitted(engine, asked))

    asyncio.run(run())
    # The one that encodes, and one that was launched ahead.
    assert first_with_chunks(launched) <= 2
    assert [mark.is_held for mark in lane.marks[1::2]] == [True]
    assert not lane.is_waited_for


def test_several_images_of_a_request_alone_are_queued_one_after_the_other(
    lane: LateLane, launched: list[StepPlan]
) -> None:
    asked = image_case(LLAVA).asked[2]

    async def run() -> None:
        async with started(LLAVA) as engine:
            assert is_right(asked, await submitted(engine, asked))

    asyncio.run(run())
    plans = [plan.part(ImagePlan) for plan in launched]
    assert sum(len(plan.encodes) for plan in plans if plan is not None) == 3
    assert first_with_chunks(launched) <= 4
    assert all(mark.is_held for mark in lane.marks[1::2]) and not lane.is_waited_for


def test_no_step_with_the_rows_of_others_waits_for_a_tower(
    lane: LateLane, launched: list[StepPlan]
) -> None:
    text, asked = image_case(LLAVA).asked[3], image_case(LLAVA).asked[0]

    async def run() -> None:
        async with started(LLAVA) as engine:
            stream = engine.submit(text.prompt, PARAMS)
            await anext(aiter(stream))
            found = await submitted(engine, asked)
            await stream.wait_finished()
            assert is_right(text, stream.request) and is_right(asked, found)

    asyncio.run(run())
    begun = next(
        number
        for number, plan in enumerate(launched)
        if (of_images := plan.part(ImagePlan)) is not None and of_images.encodes
    )
    assert launched[begun].decode_slots
    reads = next(
        number
        for number, plan in enumerate(launched)
        if (of_images := plan.part(ImagePlan)) is not None and of_images.reads
    )
    held_up = [plan for plan in launched[begun:reads] if plan.decode_slots]
    assert len(held_up) >= LATER, "the image is read before it is there"
