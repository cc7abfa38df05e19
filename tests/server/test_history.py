"""/metrics/history: the last hour of what the page draws."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import FakeEngine

from minisgl.engine.stats import EngineStats, Totals
from minisgl.scheduler.state import SchedulerCounters
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import EngineState
from minisgl.server.history import SECONDS, SERIES, SPAN, History


def stats_of(num_tokens: int) -> EngineStats:
    totals, counters = Totals(num_output_tokens=num_tokens), SchedulerCounters()
    counters.num_prompt_tokens, counters.num_cached_tokens = 7, 3
    for seconds, histogram in ((0.0012, totals.step_s), (0.2, totals.ttft_s), (900, totals.e2e_s)):
        histogram.observe(seconds, 5)
    return EngineStats(
        num_running=2,
        num_queued=1,
        num_pages=8,
        num_free_pages=2,
        num_cached_pages=0,
        counters=counters,
        totals=totals,
    )


class StatsEngine(FakeEngine):
    def stats(self) -> Any:
        return stats_of(11)


async def test_a_sample_has_the_values_of_metrics_under_their_names_without_a_key() -> None:
    state = EngineState(ServerConfig(api_key=("secret",)), StatsEngine())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/metrics/history")).json()["replicas"][""]["slots"] == []
        state.history.sample()
        answer = await client.get("/metrics/history")
        page = (await client.get("/metrics")).text
    shown = {
        sample.name + "".join(f'{{{name}="{value}"}}' for name, value in sample.labels.items()):
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if len(sample.labels) < 2
    }  # fmt: skip
    history = answer.json()
    [samples] = history["replicas"].values()
    assert history["seconds"] == SECONDS
    assert {name: [shown[name]] for name in SERIES} == samples["series"]
    assert samples["series"]["minisgl_generated_tokens_total"] == [11]


async def test_the_history_has_one_sample_for_each_slot_of_the_last_hour() -> None:
    found: EngineStats | None = None
    now = 0.0
    history = History(lambda: found, lambda: now)
    history.sample()
    assert history.samples().slots == []  # there is no engine
    for second in range(0, 2 * SPAN, 5):
        now, found = float(second), stats_of(second)
        history.sample()
    samples = history.samples()
    slots = range(SPAN // SECONDS, 2 * SPAN // SECONDS)
    assert samples.slots == [*slots]
    assert samples.series["minisgl_generated_tokens_total"] == [slot * SECONDS for slot in slots]
