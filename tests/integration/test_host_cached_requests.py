"""The whole engine with few device pages and a host tier: the tokens are those of transformers,
whatever was loaded, computed, retracted, aborted or failed meanwhile."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from support.divided_tiers import DP, check_own_tiers
from support.fp8_kv import fp8_case
from support.parity import (
    FEW_PAGES,
    Case,
    batch,
    case_of,
    complete,
    count_excused,
    greedy,
    load_engine,
)
from support.slow_lanes import SlowLane
from support.tensor_parallel import EVERYTHING, NUM_TOKENS, short_case_of, shortened

from minisgl.config import page_bytes
from minisgl.engine import AsyncEngine
from minisgl.errors import StepError
from minisgl.kvcache.copies import LoadRule
from minisgl.runner import load
from minisgl.tiers.host import host_copies
from minisgl.tiers.host.host_copies import HostCopies
from minisgl.tiers.tiers import Tiers

HOST_GB = 0.01  # more than all prompts need; the device has 30 pages of 4 tokens


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Tiers", functools.partial(Tiers, make_lane=SlowLane))


def check_rounds(case: Case, *, offloads_per_plan: int | None = None, **options: Any) -> None:
    """The case's prompts in two rounds: before the second they have fallen out of the device's
    cache, some of them while they were retracted. offloads_per_plan: what is expected, if any."""

    async def run() -> None:
        loaded = load_engine(case.folder, **{**EVERYTHING, "host_cache": HOST_GB, **options})
        async with AsyncEngine(loaded) as engine:
            assert offloads_per_plan in (None, engine._scheduler.kv.tiers.host.offloads_per_plan)
            for _ in range(2):
                params = [greedy(NUM_TOKENS)] * len(case.prompts)
                outputs = await batch(engine, case.prompts, params)
                await count_excused(engine, case, outputs)
            stats = engine.stats()
            assert stats.counters.num_retractions > 0
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
            assert stats.host is not None and stats.host.num_used_pages > 0
            loads, offloads = stats.host.traffic.loads, stats.host.traffic.offloads
            assert loads.num_pages and offloads.num_pages and loads.seconds > 0
            config = loaded.config
            layers = loaded.model.stages(config.pp)[-1]  # of rank 0
            facts = loaded.model.on_rank(config.tp).on_stage(layers)
            specs = config.whole_layers(facts.kv_specs(config.kv_dtype))
            bytes_each = page_bytes(specs, config.page_size)  # 0: of a stage without full layers
            assert loads.num_bytes == loads.num_pages * bytes_each or not bytes_each
            assert 0 < stats.counters.num_host_tokens <= stats.counters.num_cached_tokens

    asyncio.run(run())


def test_loaded_prefixes_give_the_reference_tokens() -> None:
    check_rounds(short_case_of("llama3"), padded=4)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("options", [{}, {"overlap": False, "num_pages": 40}], ids=str)
def test_slow_lanes_and_small_pieces_change_no_token(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans beside decode rows offload three pages at most, and requests wait for them."""
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 1)
    check_rounds(short_case_of("llama3"), offloads_per_plan=3, **options)


@pytest.mark.usefixtures("slow")
def test_pages_in_fp8_survive_host_memory() -> None:
    check_rounds(shortened(fp8_case("llama3", scaled=True)))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("option", [{}, {"pp": 2}], ids=str)
def test_pages_of_windowed_layers_survive_host_memory(option: dict[str, Any]) -> None:
    """Where retracted requests, too, go on behind what is loaded."""
    check_rounds(short_case_of("gpt-oss"), max_running_requests=2, **option)


def test_latents_survive_host_memory() -> None:
    """Whose pages have no values beside the keys."""
    check_rounds(short_case_of("glm-flash"))


def test_a_host_tier_smaller_than_the_device_gives_the_reference_tokens() -> None:
    page_gb = load_engine(case_of("llama3").folder).model.kv_bytes_per_token("float32") * 4e-9
    check_rounds(short_case_of("llama3"), host_cache=20 * page_gb)


@pytest.mark.parametrize("option", ["tp", "pp"])
def test_each_of_two_ranks_keeps_its_part(option: str) -> None:
    check_rounds(short_case_of("llama3"), **{option: 2})


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {}),
        ("gpt-oss", {"max_running_requests": 4, "max_prefill_length": 7}),
        ("llama3", {"pp": 2, "padded": 8}),
    ],
    ids=str,
)
def test_each_rank_that_divides_requests_has_host_memory_of_its_own(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    check_own_tiers(short_case_of(name), **options)


def test_a_request_that_its_rank_retracts_loads_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    case = short_case_of("llama3")

    async def run() -> None:
        options = {**EVERYTHING, **DP, "num_pages": 26, "host_cache": HOST_GB}
        async with AsyncEngine(load_engine(case.folder, **options)) as engine:
            params = [greedy(NUM_TOKENS)] * len(case.prompts)
            await count_excused(engine, case, await batch(engine, case.prompts, params))
            assert engine.stats().counters.num_retractions > 0
            caches = engine._scheduler.kv.of_ranks
            assert sum(cache.loads.num_begun for cache in caches) > 0

    asyncio.run(run())


def test_ranks_that_divide_requests_share_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)
    check_own_tiers(short_case_of("llama3"), disk=str(tmp_path / "disk"))


@pytest.mark.usefixtures("slow")
def test_a_stage_whose_copies_are_slow_waits_for_them() -> None:
    """The other one copies as fast as it can, and is ahead."""
    check_rounds(short_case_of("llama3"), pp=2)


@pytest.mark.usefixtures("slow")
def test_a_request_waits_for_its_pages_and_nobody_else_does() -> None:
    case = case_of("llama3")
    prompt, *_, other = sorted(case.prompts, key=len, reverse=True)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **FEW_PAGES, host_cache=HOST_GB)) as engine:
            first = await complete(engine, prompt, greedy(8))
            await complete(engine, [3] * 120, greedy(8))  # pushes it out
            SlowLane.gate.clear()
            try:
                stream = engine.submit(prompt, greedy(8))
                aborted = engine.submit(prompt, greedy(8))
                await complete(engine, other, greedy(30))
                await asyncio.sleep(0)
                assert not stream.request.output_token_ids
                stats = engine.stats()
                assert (stats.num_queued, stats.num_running) == (2, 0)
                aborted.abort()
                engine.audit()
            finally:
                SlowLane.gate.set()
            async for _ in stream:
                engine.audit()
            request = stream.request
            assert request.output_token_ids == first.token_ids
            assert 0 < request.num_host_tokens <= request.num_cached_tokens
            again = await complete(engine, prompt, greedy(8))
            assert again.token_ids == first.token_ids

    asyncio.run(run())


@pytest.mark.usefixtures("slow")
def test_a_step_that_fails_leaves_no_copy_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is to offload fails before it does; the same prompts follow."""
    case = case_of("llama3")
    queue = HostCopies.queue
    failing: list[int] = []

    def fail_once(self: HostCopies, copies: Any) -> Any:
        if copies.offloads and not failing:
            failing.append(len(copies.offloads))
            raise RuntimeError("injected")
        return queue(self, copies)

    monkeypatch.setattr(HostCopies, "queue", fail_once)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **FEW_PAGES, host_cache=HOST_GB)) as engine:
            with pytest.raises(StepError):
                for prompt in (*case.prompts, [5] * 120):
                    stream = engine.submit(prompt, greedy(8))
                    async for _ in stream:
                        engine.audit()
                    if stream.request.error is not None:
                        raise stream.request.error
            assert failing
            short = shortened(case)
            for _ in range(2):
                params = [greedy(NUM_TOKENS)] * len(short.prompts)
                await count_excused(engine, short, await batch(engine, short.prompts, params))
                engine.audit()
            assert engine.stats().counters.num_host_tokens

    asyncio.run(run())


@pytest.mark.usefixtures("slow")
def test_a_load_follows_one_that_nobody_wants_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "LOADING_BYTES", 1)
    case = case_of("llama3")
    prompt, other, *_ = sorted(case.prompts, key=len, reverse=True)

    async def run() -> None:
        async with AsyncEngine(load_engine(case.folder, **FEW_PAGES, host_cache=HOST_GB)) as engine:
            first = await complete(engine, prompt, greedy(8))
            await complete(engine, other, greedy(8))
            await complete(engine, [3] * 120, greedy(8))  # pushes both out
            SlowLane.gate.clear()
            try:
                aborted = engine.submit(other, greedy(8))
                stream = engine.submit(prompt, greedy(8))
                await complete(engine, [5], greedy(8))
                aborted.abort()
                await asyncio.sleep(0)
                engine.audit()
                stats = engine.stats()
                assert (stats.num_queued, stats.num_running) == (1, 0)
                assert not stream.request.num_cached_tokens  # it has no load, and nothing runs
            finally:
                SlowLane.gate.set()
            async for _ in stream:
                engine.audit()
            assert stream.request.output_token_ids == first.token_ids
            assert stream.request.num_host_tokens > 0

    asyncio.run(run())
