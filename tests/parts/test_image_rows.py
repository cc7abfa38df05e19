"""The rows of images in the buffer: what a chunk reads is there, and nothing is kept for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minisgl.images.picture import Picture, with_pictures
from minisgl.parts.images.host import ImagePlan, Images, Pictured
from minisgl.request import Request, RequestStatus, SamplingParams
from minisgl.scheduler.plan import Chunk
from minisgl.scheduler.state import Running, StepWork

NUM_ROWS = 12
LARGEST = 5  # tokens of a chunk
PLACEHOLDER = 99


def picture_of(number: int) -> Picture:
    """With a break in the middle of its rows."""
    is_row = np.array([False, *[True] * (1 + number), False, True])
    ids = tuple(np.where(is_row, PLACEHOLDER, 7).tolist())
    return Picture(b"%d" % number, {"pixels": np.full((2, 3), number)}, ids, is_row)


PICTURES = [picture_of(number) for number in range(5)]  # of 2 to 6 rows


@dataclass
class Bench:
    """The part between a scheduler and a device, of which both do anything that they may."""

    rng: random.Random
    see_each_other: bool  # the rows of an image
    part: Images = field(init=False)
    waiting: list[Request] = field(default_factory=list)
    running: dict[Request, Running] = field(default_factory=dict)
    buffer: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # image and row, by place
    # Of the steps in flight: their number, their plan, and the images that they encode.
    launched: deque[tuple[int, ImagePlan | None]] = field(default_factory=deque)
    to_report: list[tuple[int, str]] = field(default_factory=list)
    num_made: int = 0
    step: int = 0
    num_encoded: int = 0

    def __post_init__(self) -> None:
        self.part = Images(NUM_ROWS, largest_block=LARGEST if self.see_each_other else None)

    def submit(self) -> None:
        pictures = self.rng.choices(PICTURES, k=self.rng.randint(1, 3))
        if sum(each.num_rows for each in {*pictures}) > NUM_ROWS:
            return
        template = [token for _ in pictures for token in (1, 2, PLACEHOLDER)]
        prompt, spans = with_pictures(template, PLACEHOLDER, pictures)
        self.num_made += 1
        extra = self.part.extra(SamplingParams(), prompt, Pictured(spans))
        assert extra is not None
        salt = self.rng.choice(["a", "b"])
        self.waiting.append(
            Request(
                str(self.num_made),
                prompt,
                SamplingParams(),
                max_tokens=1,
                seed=0,
                cache_salt=salt,
                extras=(extra,),
            )
        )

    def admit(self, *, always: bool = False) -> None:
        """Ask for the requests that wait, in any order, and let some of those that may join."""
        order = self.waiting if always else self.rng.sample(self.waiting, len(self.waiting))
        for request in list(order):
            admitted = self.part.admits(request, self.running.values())
            if admitted and (always or self.rng.random() < 0.7):
                self.waiting.remove(request)
                request.status = RequestStatus.RUNNING
                cached = self.rng.randrange(request.num_prompt_tokens)
                self.running[request] = running_of(request, cached, slot=self.num_made)

    def launch(self) -> None:
        """Plan chunks of any requests, and do what the plan says."""
        self.step += 1
        work = StepWork(self.step, 0, None)  # type: ignore[arg-type]
        for running in self.running.values():
            left = running.num_to_prefill - running.num_scheduled
            if left and self.rng.random() < 0.7:
                start = running.num_scheduled
                end = running.request.chunk_end(start + self.rng.randint(1, min(left, LARGEST)))
                if end <= start:
                    continue
                ids = running.request.token_ids[start:end]
                work.chunks.append(Chunk(running.slot, start, ids, samples=False))
                work.chunk_owners.append(running)
        plan = self.part.plan(work)
        seen: list[tuple[int, list[int]]] = []
        for chunk, running in work.owned_chunks:
            self.check(chunk, running, plan)
            running.num_scheduled = chunk.end
            of_prompt = last_seen(running.request.token_ids)
            seen.append((chunk.slot, of_prompt[chunk.start : chunk.end]))
        if self.see_each_other and plan is not None and plan.reads:
            told = [(slot, np.frombuffer(each, np.int32)) for slot, each in plan.last_seen]
            assert [(slot, each.tolist()) for slot, each in told] == seen
        else:
            assert plan is None or not plan.last_seen
        for encode in plan.encodes if plan is not None else ():
            (array,) = encode.inputs
            number = int(np.frombuffer(array.data, array.dtype).reshape(array.shape)[0, 0])
            assert len(encode.rows) == PICTURES[number].num_rows
            self.num_encoded += 1
            self.buffer |= {row: (b"%d" % number, k) for k, row in enumerate(encode.rows)}
            why = "no luck" if self.rng.random() < 0.1 else ""
            self.to_report.append((encode.number, why))
        self.launched.append((self.step, plan))

    def check(self, chunk: Chunk, running: Running, plan: ImagePlan | None) -> None:
        """Each row of an image is read where it is, and all else is as it was."""
        wanted: list[Any] = list(running.request.token_ids)
        pictured = running.request.extra(Pictured)
        assert pictured is not None
        for span in pictured.spans:
            places = span.start + np.flatnonzero(span.picture.is_row)
            for k, place in enumerate(places.tolist()):
                wanted[place] = span.picture.digest, k
        if self.see_each_other and chunk.end < len(wanted):
            ids = running.request.token_ids
            assert not (ids[chunk.end - 1] < 0 and ids[chunk.end] < 0), "an image is cut"
        got = [self.buffer[-1 - each] if each < 0 else each for each in chunk.token_ids]
        assert got == wanted[chunk.start : chunk.end]
        if any(each < 0 for each in chunk.token_ids):
            assert plan is not None and plan.is_eager and plan.reads

    def settle(self, *, all_of_them: bool = False) -> None:
        if not self.launched:
            return
        _, plan = self.launched.popleft()
        if plan is None:
            return
        count = len(self.to_report) if all_of_them or plan.is_alone else self.rng.randint(0, 2)
        reported, self.to_report = tuple(self.to_report[:count]), self.to_report[count:]
        for request, _ in self.part.settle(None, reported):  # type: ignore[arg-type]
            assert request in self.waiting, "it has run already"
            self.end(request)

    def fail(self) -> None:
        """Lose the steps from one in flight on."""
        if not self.launched:
            return
        step = self.rng.choice([step for step, _ in self.launched])
        while self.launched and self.launched[-1][0] >= step:
            _, plan = self.launched.pop()
            for encode in plan.encodes if plan is not None else ():
                if self.rng.random() < 0.5:  # it was not begun
                    self.to_report = [each for each in self.to_report if each[0] != encode.number]
        for request in list(self.running):
            self.end(request)
        self.part.failed(step)

    def replace_weights(self) -> None:
        """Which gives the requests that wait another namespace."""
        for request in self.waiting:
            request.namespace = b"new " + request.namespace

    def end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.running.pop(request, None)
        self.waiting = [other for other in self.waiting if other is not request]

    def end_any(self) -> None:
        if self.waiting or self.running:
            self.end(self.rng.choice([*self.waiting, *self.running]))

    def end_those_that_are_done(self) -> None:
        for request, running in list(self.running.items()):
            if running.num_scheduled == running.num_to_prefill:
                self.end(request)

    def retract(self) -> None:
        if self.running:
            request = self.rng.choice([*self.running])
            del self.running[request]
            request.status = RequestStatus.WAITING
            self.waiting.append(request)


def running_of(request: Request, num_scheduled: int, slot: int) -> Running:
    return Running(
        request=request,
        arrival=0,
        slot=slot,
        lease=None,  # type: ignore[arg-type]
        key=b"",
        num_to_prefill=request.num_prompt_tokens,
        num_scheduled=num_scheduled,
        last_scheduled=0,
        num_room=0,
        resumed=False,
    )


def last_seen(ids: Sequence[int]) -> list[int]:
    """The last position that each token sees, where rows that follow each other do."""
    found = list(range(len(ids)))
    for place in reversed(range(len(ids) - 1)):
        if ids[place] < 0 and ids[place + 1] < 0:
            found[place] = found[place + 1]
    return found


@given(st.integers(0, 2**32), st.booleans())
def test_chunks_read_the_rows_of_their_images_and_every_request_is_served(
    seed: int, see_each_other: bool
) -> None:
    bench = Bench(random.Random(seed), see_each_other)
    moves = (bench.submit, bench.admit, bench.launch, bench.settle, bench.end_those_that_are_done)
    rare = (bench.end_any, bench.retract, bench.fail, bench.replace_weights)
    for _ in range(60):
        bench.rng.choice(moves if bench.rng.random() < 0.9 else rare)()
        bench.part.audit(bench.running.values())
    for _ in range(300):  # in order, and undisturbed
        if not (bench.waiting or bench.running):
            break
        bench.admit(always=True)
        bench.launch()
        bench.settle(all_of_them=True)
        bench.end_those_that_are_done()
        bench.part.audit(bench.running.values())
    assert not (bench.waiting or bench.running), "a request waits for ever"


def test_what_nobody_wants_any_more_is_not_encoded() -> None:
    bench = Bench(random.Random(1), see_each_other=False)
    while not bench.waiting:
        bench.submit()
    bench.admit(always=True)
    bench.end_any()
    bench.launch()
    assert not (bench.num_encoded or bench.part.wants_step)
