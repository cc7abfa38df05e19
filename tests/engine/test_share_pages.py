"""Engines that exchange KV pages over TCP, with models: what `share_pages` refuses, and brings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from support.demo_adapters import save_demo_adapter
from support.gated_runner import gated_server
from support.page_sharing import PROMPT, check_handover, sharing_engine
from support.parity import case_of, complete, greedy, load_engine
from support.serving import demo_engine
from support.waiting import until

from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError, EngineStoppedError, StepError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.runner import setup
from minisgl.scheduler.plan import StepResult
from minisgl.tiers.peers import page_exchange

TOKEN = "the secret of the cluster"


async def engine(**options: Any) -> AsyncEngine:
    return await sharing_engine(device="cpu", **options)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints of which samples were read."""
    folders: list[Path] = []

    def fingerprint(folder: Path) -> bytes:
        folders.append(folder)
        return b"weights"

    monkeypatch.setattr(setup, "weights_fingerprint", fingerprint)
    return folders


async def test_engines_exchange_pages_over_tcp_with_those_that_know_the_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hashed: list[Path]
) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    async with await engine() as prefill, await engine() as decode, await engine() as stranger:
        assert not hashed, "a start without disk and roles reads no samples"
        address = await prefill.pages.share("127.0.0.1:0", always_load=False)
        assert int(address.removeprefix("127.0.0.1:")) > 0
        with pytest.raises(ConfigError, match=r"address .*: KV pages cannot be exchanged here"):
            await decode.pages.share(address, always_load=False)  # it is taken
        await decode.pages.share("127.0.0.1:0", always_load=True)
        monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", f"not {TOKEN}")
        await stranger.pages.share("127.0.0.1:0", always_load=True)
        assert len(hashed) == 4

        assert not await stranger.pages.fetch(address, PROMPT)
        assert "does not accept the cluster token" in caplog.text
        await check_handover(prefill, decode, address, is_direct=False)


async def test_pages_are_exchanged_for_the_adapter_that_they_were_computed_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    save_demo_adapter(tmp_path, seed=0)
    # Each calls it by a name of its own.
    one, other = [await engine(lora=(f"{name}={tmp_path}",)) for name in ("one", "other")]
    async with one as prefill, other as decode:
        address = await prefill.pages.share("127.0.0.1:0", always_load=False)
        await decode.pages.share("127.0.0.1:0", always_load=True)
        assert await prefill.pages.offer(PROMPT, extras=[prefill.adapter("one")])
        adapter = decode.adapter("other")
        assert not await decode.pages.fetch(address, PROMPT)
        assert await decode.pages.fetch(address, PROMPT, extras=[adapter])
        found = []
        for extras in ([], [adapter]):
            stream = decode.submit(PROMPT, greedy(1), extras=extras)
            await stream.wait_finished()
            found.append(stream.request.num_cached_tokens)
        assert found[0] == 0 and found[1] > len(PROMPT) - 32


async def test_no_engine_has_pages_of_weights_that_another_has_replaced(
    tmp_path: Path, hashed: list[Path]
) -> None:
    async with await engine() as one, await engine() as other:
        addresses = [
            await each.pages.share(str(tmp_path / name), always_load=True)
            for each, name in ((one, "one"), (other, "other"))
        ]
        await other.weights.update_from_files(str(DEMO_FOLDER))
        assert await one.pages.offer(PROMPT)
        await other.pages.fetch(addresses[0], PROMPT)
        assert (await complete(other, PROMPT, greedy(1))).num_cached_tokens == 0
        assert await other.pages.offer(PROMPT[::-1])
        assert not await one.pages.fetch(addresses[1], PROMPT[::-1])
        assert (await complete(one, PROMPT[::-1], greedy(1))).num_cached_tokens == 0


@pytest.mark.parametrize("lacks", [None, "sender", "receiver"])
async def test_pages_go_from_device_to_device_where_both_engines_can(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch, lacks: str | None
) -> None:
    async with await engine() as prefill, await engine() as decode:
        address = await prefill.pages.share(str(tmp_path / "a"), always_load=False)
        await decode.pages.share(str(tmp_path / "b"), always_load=False)
        if lacks is not None:
            ranks = prefill._runner if lacks == "sender" else decode._runner
            monkeypatch.setattr(ranks._tiers._exchange, "_device_carriers", [])
            with monkeypatch.context() as impatient:  # and what follows is not given up
                impatient.setattr(page_exchange, "SILENCE_S", 0.2)
                assert await prefill.pages.offer(PROMPT)
                assert not await decode.pages.fetch(address, PROMPT), "the first one is lost"
        await check_handover(prefill, decode, address, is_direct=lacks is None)


@pytest.mark.parametrize(("is_direct", "dtype"), [(True, "model"), (False, "fp8")])
async def test_latents_go_from_engine_to_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool, dtype: str
) -> None:
    """Pages whose layers keep keys without values."""
    monkeypatch.setenv("MINISGL_CLUSTER_TOKEN", TOKEN)
    options: dict[str, Any] = {"num_pages": 60, "max_seq_len_override": 256, "host_cache": 0.05}
    loaded = [
        load_engine(case_of("glm-flash").folder, kv_cache_dtype=dtype, **options) for _ in "ab"
    ]
    async with AsyncEngine(loaded[0]) as prefill, AsyncEngine(loaded[1]) as decode:
        own = [str(tmp_path / name) if is_direct else "127.0.0.1:0" for name in "ab"]
        address = await prefill.pages.share(own[0], always_load=False)
        await decode.pages.share(own[1], always_load=True)
        await check_handover(prefill, decode, address, is_direct=is_direct)


async def test_engines_of_another_form_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hashed: list[Path]
) -> None:
    async with await engine() as prefill, await engine(kv_cache_dtype="fp8") as decode:
        address = await prefill.pages.share(str(tmp_path / "a"), always_load=False)
        await decode.pages.share(str(tmp_path / "b"), always_load=False)
        assert await prefill.pages.offer(PROMPT)
        assert not await decode.pages.fetch(address, PROMPT)
        assert "another model, --tp, --dp-attention, KV dtype, page size" in caplog.text
    assert not os.listdir(tmp_path)


async def test_pages_are_not_shared_without_a_host_cache_or_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINISGL_CLUSTER_TOKEN", raising=False)
    async with await demo_engine(num_pages=60) as plain:
        with pytest.raises(
            ConfigError, match="--host-cache 0: sharing pages between engines needs a host cache"
        ):
            await plain.pages.share("127.0.0.1:0", always_load=False)
    shared = await engine()
    async with shared:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: .* need a shared secret"):
            await shared.pages.share("192.0.2.1:0", always_load=False)
    with pytest.raises(EngineStoppedError):
        await shared.pages.share("127.0.0.1:0", always_load=False)


async def test_requests_that_wait_for_pages_end_with_an_engine_that_fails(
    tmp_path: Path, hashed: list[Path]
) -> None:
    async with await engine() as prefill, await engine() as decode:
        begun = asyncio.Event()
        decode._runner.move = lambda moves, done: begun.set()
        address = await prefill.pages.share(str(tmp_path / "a"), always_load=False)
        await decode.pages.share(str(tmp_path / "b"), always_load=False)
        assert await prefill.pages.offer(PROMPT)
        fetching = asyncio.ensure_future(decode.pages.fetch(address, PROMPT))
        await begun.wait()
        decode._steps.failures.die(EngineStoppedError("A rank was killed."))
        assert not await fetching


async def test_an_offer_is_none_before_the_step_that_copies_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later step fails first, and then that one."""
    async with gated_server(host_cache=0.01) as gated:
        engine, runner = gated.engine, gated.runner
        collect, fails = runner.collect, set[int]()

        def collect_or_fail(handle: StepResult) -> StepResult:
            result = collect(handle)
            if handle.step in fails:
                raise StepError(f"step {handle.step} was told to fail")
            return result

        monkeypatch.setattr(runner, "collect", collect_or_fail)
        await engine.pages.share(str(tmp_path / "pages"), always_load=False)
        runner.close_gate()
        offering = asyncio.ensure_future(engine.pages.offer(PROMPT[:20]))
        await until(lambda: len(runner.launched) == 1)
        runner.step()
        await until(lambda: len(runner.launched) == 2)  # and copies
        copying = runner.launched[-1].step
        fails.add(copying)
        runner.fail_at = frozenset({copying + 1})
        with pytest.raises(StepError):
            await complete(engine, PROMPT[:5], greedy(1))
        await asyncio.sleep(0)
        assert not offering.done()
        runner.open()
        assert not await offering
        host = engine.stats().host
        assert host is not None and not host.num_used_pages
