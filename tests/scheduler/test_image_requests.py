"""Requests with images in the queue: each gets the rows of its images, whatever waits beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import StepError
from minisgl.images.picture import Picture, with_pictures
from minisgl.kvcache.manager import KVCacheManager
from minisgl.parts.adapters.host import Adapted, AdapterPlan, Adapters
from minisgl.parts.images.host import ImagePlan, Images, Pictured
from minisgl.request import EVERYONE, Extra, Request, SamplingParams, Tenant
from minisgl.scheduler import admission
from minisgl.scheduler.admission import MAX_OVERTAKEN, MAX_POSTPONED
from minisgl.scheduler.parts import Part
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler

PLACEHOLDER = 99
NUM_ROWS = 20


def picture(name: str, num_rows: int) -> Picture:
    pixels = np.zeros((2, 2), np.uint8)
    ids = (PLACEHOLDER,) * num_rows
    return Picture(name.encode(), {"pixels": pixels}, ids, np.ones(num_rows, bool))


@dataclass
class Bench:
    """A scheduler, and a device whose towers and adapters are there a step after their plan."""

    num_slots: int = 8
    num_pages: int = 200
    client_share: float = 1.0
    num_places: int = 0  # of adapters
    images: Images = field(default_factory=lambda: Images(NUM_ROWS))
    on_way: list[tuple[int, str]] = field(default_factory=list)
    loading: list[tuple[int, int]] = field(default_factory=list)
    num_made: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        adapters = Adapters(self.num_places)
        for number in range(10):
            adapters.load(number)
        parts: list[Part] = [adapters, self.images] if self.num_places else [self.images]
        self.scheduler = Scheduler(
            kv=KVCacheManager(num_pages=self.num_pages, page_size=4, cache_type="radix"),
            num_slots=self.num_slots,
            max_seq_len=70,
            max_prefill_length=512,
            max_queued_requests=1000,
            client_share=self.client_share,
            parts=parts,
        )

    def submit(
        self,
        *pictures: Picture,
        max_tokens: int = 3,
        tenant: Tenant = EVERYONE,
        adapter: int | None = None,
    ) -> Request:
        self.num_made += 1
        template = [5, 100 + self.num_made, *[PLACEHOLDER] * len(pictures), 6]
        prompt, spans = with_pictures(template, PLACEHOLDER, pictures)
        extras: list[Extra] = []
        if pictures:
            seen = self.images.extra(SamplingParams(), prompt, Pictured(spans))
            assert seen is not None
            extras.append(seen)
        if adapter is not None:
            extras.append(Adapted(adapter, b"%d" % adapter))
        request = Request(
            str(self.num_made),
            prompt,
            SamplingParams(),
            max_tokens=max_tokens,
            seed=0,
            tenant=tenant,
            extras=extras,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> StepPlan | None:
        """None: there is nothing to compute."""
        plan = self.scheduler.plan()
        self.scheduler.audit()
        if plan is not None:
            self.num_steps += 1
            outcomes = [self.outcome(part) for part in plan.parts]
            result = StepResult(plan.step, [1] * plan.num_samples, parts=outcomes)
            self.scheduler.settle(result)
            self.scheduler.audit()
        return plan

    def outcome(self, plan: object) -> object:
        if isinstance(plan, ImagePlan):
            ended, self.on_way = tuple(self.on_way), [(each.number, "") for each in plan.encodes]
            return ended
        assert isinstance(plan, AdapterPlan)
        loaded, self.loading = tuple(self.loading), [*plan.loads]
        return loaded

    def run(self, requests: Sequence[Request]) -> None:
        """Until all have ended."""
        while not all(request.finished for request in requests):
            plan = self.step()
            assert plan is not None, "a request waits for ever"
            assert self.num_steps < 60 * (1 + self.num_made), "a request waits for ever"


def test_requests_that_have_their_rows_join_before_one_that_waits_for_them() -> None:
    """It was passed over too often, so no others may take rows; text passes it."""
    bench = Bench()
    first = [bench.submit(picture(f"first {k}", 4)) for k in range(2)]
    bench.step()
    large = bench.submit(picture("large", 9), picture("too", 9))
    small: list[Request] = []
    while sum(request.finished for request in small) <= MAX_OVERTAKEN and len(small) < 100:
        small.append(bench.submit(picture(f"small {len(small)}", 4)))
        if bench.step() is None:
            break
    text = bench.submit()
    bench.run([*first, large, *small, text])


def test_a_request_without_room_for_its_images_takes_no_adapter_from_one_that_has_its_rows() -> (
    None
):
    bench = Bench(num_places=1)
    bench.run([bench.submit(tenant=Tenant("had its turn"))])
    small = bench.submit(picture("small", 4), adapter=1, tenant=Tenant("had its turn"))
    while not bench.images.holds(small):
        bench.step()
    large = bench.submit(picture("large", 9), picture("too", 9), adapter=2, tenant=Tenant("next"))
    bench.run([small, large])


def test_an_image_keeps_no_request_that_has_ended() -> None:
    bench = Bench()
    for _ in range(50):
        bench.run([bench.submit(picture("the same", 4))])
    (entry,) = bench.images._entries.values()
    assert len(entry.users) <= 1


def test_a_client_that_may_have_no_more_join_keeps_no_rows_from_others() -> None:
    bench = Bench(client_share=0.5)
    held = [
        bench.submit(picture(str(number), 2), max_tokens=40, tenant=Tenant("held"))
        for number in range(20)
    ]
    for _ in range(20):
        bench.step()
    other = bench.submit(picture("other", 10), tenant=Tenant("other"))
    for _ in range(10):
        bench.step()
    assert other.finished and not any(request.finished for request in held)
    bench.run(held)


def test_a_request_that_has_lost_an_image_does_not_keep_the_others() -> None:
    bench = Bench()
    bench.run([bench.submit(tenant=Tenant("had its turn"))])
    small = bench.submit(picture("a", 4), picture("b", 4), tenant=Tenant("had its turn"))
    bench.step()
    plan = bench.scheduler.plan()
    assert plan is not None and not small.finished
    bench.scheduler.fail(plan.step, StepError("the step that encodes the second"))
    bench.scheduler.audit()
    large = bench.submit(picture("large", 9), picture("too", 9), tenant=Tenant("next"))
    bench.scheduler._waiting.by_id[large.id].num_overtaken = MAX_OVERTAKEN
    bench.run([small, large])


def test_a_request_that_has_its_rows_is_found_behind_any_number_that_wait_for_them() -> None:
    bench = Bench()
    first, too_large, small = (
        bench.submit(*pictures, tenant=Tenant("one"))
        for pictures in (
            [picture("first", 4)],
            [picture("large", 9), picture("too", 9)],
            [picture("small", 4)],
        )
    )
    bench.step()
    assert bench.images.holds(small) and not bench.images.holds(too_large)
    others = [
        bench.submit(picture("a", 9), picture("b", 9), tenant=Tenant(f"other {number}"))
        for number in range(2 * MAX_POSTPONED)
    ]
    bench.run([first, too_large, small, *others])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_schedule_of_requests_with_images_serves_each(seed: int) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("MAX_OVERTAKEN", "MAX_POSTPONED"):
            patch.setattr(admission, limit, rng.choice([1, 3, 32]))
        run_schedule(rng)


def run_schedule(rng: random.Random) -> None:
    bench = Bench(
        num_slots=rng.randint(1, 8),
        num_pages=rng.choice([20, 40, 200]),
        client_share=rng.choice([0.5, 1]),
        num_places=rng.choice([0, 0, 1, 2]),
    )
    num_tenants = rng.choice([1, 2, 50])
    with_client = rng.random() < 0.5

    def submit() -> Request:
        name = str(rng.randrange(num_tenants))
        tenant = Tenant(client=name) if with_client else Tenant(user=name)
        total, pictures = 0, list[Picture]()
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            rows = rng.choice([2, 4, 9])
            if total + rows <= NUM_ROWS:
                total += rows
                pictures.append(picture(f"{rng.randrange(40)} of {rows}", rows))
        adapter = rng.randrange(4) if bench.num_places and rng.random() < 0.5 else None
        tokens = rng.choice([1, 3, 30])
        return bench.submit(*pictures, max_tokens=tokens, tenant=tenant, adapter=adapter)

    requests: list[Request] = []
    for _ in range(rng.choice([5, 20])):
        requests += [submit() for _ in range(rng.choice([0, 1, 2, 10]))]
        if rng.random() < 0.1 and requests:
            bench.scheduler.cancel(rng.choice(requests))
        if rng.random() < 0.05:
            bench.scheduler.retract_all()
        bench.step()
    bench.run(requests)
