"""Engines that exchange what is beside pages, with models: snapshots of states, and pages of
windowed layers. tests/integration/test_pairs.py compares each kind, too."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cache_kinds import FEW, NUM_TOKENS, STATE_CACHE, STATES, WINDOWED, case_of
from support.parity import Case, complete, count_excused, greedy, load_engine

from minisgl.config import page_bytes
from minisgl.engine import AsyncEngine
from minisgl.engine.stats import TransferStats
from minisgl.kvcache.transits import Transit
from minisgl.tiers.carriers.carrier import Readable
from minisgl.tiers.carriers.socket_pages import SocketPages

OPTIONS: dict[str, Any] = {**FEW, "num_pages": 100, "host_cache": 0.01}
PAGE = FEW["page_size"]


def started(case: Case, kind: str, **options: Any) -> AsyncEngine:
    loaded = load_engine(case.folder, **OPTIONS | (STATE_CACHE if kind == STATES else {}) | options)
    assert bool(loaded.model.states) == (kind == STATES)
    is_freeing = kind == WINDOWED and not options.get("whole_pages")
    assert (loaded.config.windows is not None) == is_freeing
    return AsyncEngine(loaded)


@contextlib.asynccontextmanager
async def two_engines(
    kind: str, folder: Path, prefill: dict[str, Any], decode: dict[str, Any]
) -> AsyncIterator[tuple[Case, AsyncEngine, AsyncEngine, str]]:
    """A case, the engines with these options, and the address of the first."""
    case = case_of(kind)
    async with started(case, kind, **prefill) as first, started(case, kind, **decode) as second:
        address = await first.pages.share(str(folder / "a"), always_load=False)
        await second.pages.share(str(folder / "b"), always_load=True)
        yield case, first, second, address


async def ask(engine: AsyncEngine, case: Case, place: int) -> int:
    """Compare the tokens of a prompt with transformers; returns how many of it were cached."""
    output = await complete(engine, case.prompts[place], greedy(NUM_TOKENS))
    one = Case(case.spec, case.folder, [case.prompts[place]], [case.runs[place]])
    await count_excused(engine, one, [output])
    engine.audit()
    return output.num_cached_tokens


def transfers(engine: AsyncEngine) -> TransferStats:
    found = engine.stats().transfers
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [STATES, WINDOWED])
async def test_what_is_beside_pages_comes_with_those_that_are_missing(
    kind: str, tmp_path: Path
) -> None:
    """Of one prompt all, and of another one the end, behind what the engine has computed itself."""
    async with two_engines(kind, tmp_path, {}, {}) as (case, prefill, decode, address):
        received = [0]
        for place, num_known in ((0, 0), (2, 33)):
            prompt = case.prompts[place]
            if num_known:
                await complete(decode, prompt[:num_known], greedy(2))
            assert await prefill.pages.offer(prompt)
            assert await decode.pages.fetch(address, prompt)
            num_pages = (len(prompt) - 1) // PAGE
            assert await ask(decode, case, place) == num_pages * PAGE
            received.append(transfers(decode).received.num_bytes)
        while transfers(prefill).sent.num_transfers < 2:  # noqa: ASYNC110 - the other may be first
            await asyncio.sleep(0.01)
        of_prefill, of_decode = transfers(prefill), transfers(decode)
        assert of_prefill.sent.num_bytes == of_decode.received.num_bytes
        assert of_decode.received.num_direct == of_decode.num_failed == 0
        assert decode.stats().counters.num_host_tokens == 28 + 48 - 32

        # In pages: seven, then the four behind 32 tokens, each with a snapshot, or with what a
        # window of 20 tokens reaches back to of them.
        whole, end = received[1], received[2] - received[1]
        config = decode.config
        layers = config.whole_layers(decode.model.layer_specs(config.kv_dtype))
        each = page_bytes(layers, PAGE)
        assert whole % each == end % each == 0
        beside = whole // each - 7, end // each - 4
        assert beside == (10, 8) if kind == WINDOWED else beside[0] == beside[1] > 0


async def test_a_prompt_whose_end_has_no_snapshot_is_computed_by_whoever_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_engines(STATES, tmp_path, {}, {}) as (case, prefill, decode, address):
        # At an earlier end there is one.
        assert await prefill.pages.offer(case.prompts[2][:33])
        monkeypatch.setattr(prefill._scheduler.kv, "take_snapshots", lambda *step: ())
        assert await prefill.pages.offer(case.prompts[2])
        assert await decode.pages.fetch(address, case.prompts[2])
        assert await ask(decode, case, 2) == 32
        assert not await prefill.pages.offer(case.prompts[0])
        assert not await decode.pages.fetch(address, case.prompts[0])
        assert await ask(decode, case, 0) == 0
        assert transfers(decode).num_failed == 1


class FailingPages(SocketPages):
    """Brings one page at a time, and the sender fails after nine of them."""

    num_parts = 0

    def part_size(self, page_bytes: int) -> int:
        return 1

    def put(self, slot: int, pages: Sequence[memoryview]) -> Readable:
        self.num_parts += 1
        if self.num_parts > 9:
            raise RuntimeError("the rank is lost")
        return super().put(slot, pages)


def fail_on_the_way(prefill: AsyncEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill._runner._tiers._exchange, "_host_carriers", [FailingPages()])


def keep_a_part(prefill: AsyncEngine, patch: pytest.MonkeyPatch) -> None:
    """The sender knows another number of pages beside those of the prefix."""

    def lacked_by(transit: Transit, num_pages: int) -> tuple[list[int], int]:
        pages, num_beside = whole(transit, num_pages)
        return pages[:-1], num_beside - 1

    whole = Transit.lacked_by
    patch.setattr(Transit, "lacked_by", lacked_by)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (fail_on_the_way, r"8 of \d+ pages have come"),
        (keep_a_part, "the other engine offers other pages beside a prefix"),
    ],
)
@pytest.mark.parametrize("kind", [STATES, WINDOWED])
async def test_a_prefix_whose_parts_have_not_all_come_is_computed(
    kind: str,
    harm: Callable[[AsyncEngine, pytest.MonkeyPatch], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with two_engines(kind, tmp_path, {}, {}) as (case, prefill, decode, address):
        with monkeypatch.context() as patch:
            harm(prefill, patch)
            assert await prefill.pages.offer(case.prompts[0])
            assert not await decode.pages.fetch(address, case.prompts[0])
        assert re.search(reason, caplog.text)
        assert await ask(decode, case, 0) == 0
        assert await prefill.pages.offer(case.prompts[2])
        assert await decode.pages.fetch(address, case.prompts[2])
        assert await ask(decode, case, 2) == 48
        assert transfers(decode).num_failed == 1


@pytest.mark.parametrize(
    ("kind", "others"),
    [(WINDOWED, {"whole_pages": True}), (STATES, {"speculative": "ngram"})],
    ids=str,
)
async def test_engines_that_keep_something_else_beside_pages_exchange_none(
    kind: str, others: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_engines(kind, tmp_path, others, {}) as (case, prefill, decode, address):
        assert await prefill.pages.offer(case.prompts[0])
        assert not await decode.pages.fetch(address, case.prompts[0])
        assert "page size, --whole-pages or --speculative" in caplog.text
        assert await ask(decode, case, 0) == 0


async def test_whole_pages_go_from_device_to_device(tmp_path: Path) -> None:
    whole = {"whole_pages": True}
    async with two_engines(WINDOWED, tmp_path, whole, whole) as (case, prefill, decode, address):
        assert await prefill.pages.offer(case.prompts[0])
        assert await decode.pages.fetch(address, case.prompts[0])
        assert await ask(decode, case, 0) == 28
        assert transfers(decode).received.num_direct == 1
