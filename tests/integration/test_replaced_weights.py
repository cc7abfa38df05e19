"""Weights that are replaced while requests run, against engines that were loaded with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.draft_networks import hybrid
from support.parity import load_engine
from support.replaced_weights import (
    GREEDY,
    NORM,
    PROMPTS,
    answers,
    answers_of,
    check_memory,
    check_replaced,
    check_slept,
    ended,
    engine_of,
    folder_of,
    weights_of,
)
from support.sent_weights import check_closed, check_killed, check_sent, infos

from minisgl import LLM
from minisgl.distributed.addresses import GroupAddress
from minisgl.engine import AsyncEngine
from minisgl.engine.weights import (
    AsleepError,
    InFlight,
    WeightsIncompleteError,
    WeightsReplacedError,
)
from minisgl.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    InvalidRequestError,
    MinisglError,
)
from minisgl.models import sleeping
from minisgl.models.hub import DEMO_FOLDER
from minisgl.parts.weights.host import versions_of
from minisgl.request import FinishReason

WIDE_HEAD = {"dtype": "bfloat16", "head_dtype": "float32"}


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, WIDE_HEAD], ids=str)
def test_answers_are_those_of_an_engine_that_was_loaded_with_the_weights(
    options: dict[str, Any],
) -> None:
    check_replaced(**options)


@pytest.mark.parametrize("options", [{"padded": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_an_engine_that_has_slept_answers_as_before(options: dict[str, int]) -> None:
    check_slept(**options)


def test_states_and_the_network_that_drafts_sleep_too() -> None:
    prompt = [*range(1, 10)] * 5

    async def run() -> None:
        folder = hybrid("Qwen3_5ForCausalLM")[1]
        async with AsyncEngine(load_engine(folder, page_size=4, speculative="mtp")) as engine:
            expected = (await ended(engine, prompt)).output_token_ids
            num_drafted = engine.stats().drafts
            for level in (1, 2):
                await engine.weights.sleep(level)
                check_memory(engine)
                await engine.weights.wake()
                if level == 2:
                    await engine.weights.update_from_files(str(folder))
                request = await ended(engine, prompt)
                assert (request.output_token_ids, request.num_cached_tokens) == (expected, 0)
            assert num_drafted is not None and (drafts := engine.stats().drafts) is not None
            assert drafts.num_accepted == 3 * num_drafted.num_accepted

    asyncio.run(run())


def test_what_host_memory_holds_is_matched_no_more_after_a_sleep(tmp_path: Path) -> None:
    """What is on disk is, as long as the weights are those that have computed it."""
    expected = answers_of(0)
    options = {"host_cache": 0.01, "num_pages": 24, "max_seq_len_override": 80}

    async def run(**more: Any) -> None:
        async with engine_of(0, **options, **more) as engine:
            for _ in range(2):
                for prompt in PROMPTS:  # which push pages into host memory
                    await ended(engine, prompt)
            for other in PROMPTS[1:3]:
                await ended(engine, other[::-1], max_tokens=36)
            host = engine.stats().host
            assert host is not None and host.num_used_pages > 0
            stream = await midway(engine, salt="slept")
            await engine.weights.sleep()
            engine.audit()
            check_memory(engine)
            await engine.weights.wake()
            assert (host := engine.stats().host) is not None and host.num_used_pages == 0
            await stream.wait_finished()
            requests = [await ended(engine, prompt) for prompt in PROMPTS]
            assert [each.num_host_tokens for each in requests] == [0] * len(PROMPTS)
            assert [(each.output_token_ids, each.logprobs) for each in requests] == expected
        async with engine_of(0, **options, **more) as engine:
            again = [await ended(engine, prompt) for prompt in PROMPTS]
            assert any(each.num_disk_tokens for each in again) == bool(more)
            assert [each.output_token_ids for each in again] == [tokens for tokens, _ in expected]

    asyncio.run(run())
    asyncio.run(run(disk_cache=str(tmp_path)))


def test_an_engine_whose_pages_others_share_does_not_sleep(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine_of(0, host_cache=0.01) as engine:
            await engine.pages.share(str(tmp_path / "engine"), always_load=False)
            with pytest.raises(ConfigError, match="allowed: to sleep unshared"):
                await engine.weights.sleep()
            await ended(engine, PROMPTS[0])

    asyncio.run(run())


def test_what_weights_of_two_versions_have_computed_is_matched_by_no_later_engine(
    tmp_path: Path,
) -> None:
    tiers = {"host_cache": 0.01, "disk_cache": str(tmp_path), "num_pages": 200}

    async def run() -> None:
        async with engine_of(0, **tiers) as engine:
            stream = await midway(engine)
            await engine.weights.update(weights_of(1))
            await stream.wait_finished()
            engine.audit()
        prompt = [*PROMPTS[1], *stream.request.output_token_ids]
        async with engine_of(0, num_pages=200) as engine:
            alone = await ended(engine, prompt)
        async with engine_of(0, **tiers) as engine:
            request = await ended(engine, prompt)
            assert 0 < request.num_disk_tokens <= len(PROMPTS[1])
            assert request.output_token_ids == alone.output_token_ids

    asyncio.run(run())


async def midway(engine: AsyncEngine, salt: str | None = None) -> Any:
    """A request that has sampled some tokens, and goes on."""
    stream = engine.submit(PROMPTS[1], replace(GREEDY, max_tokens=40), cache_salt=salt)
    while stream.request.num_output_tokens < 5:
        await anext(stream)
    return stream


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_requests_in_flight_go_on_with_the_weights_that_come(in_flight: InFlight) -> None:
    expected = answers_of(1)

    async def run() -> None:
        async with engine_of(0, num_pages=200, max_running_requests=1) as engine:
            stream = await midway(engine)
            request, queued = stream.request, engine.submit(PROMPTS[1], GREEDY)
            await engine.weights.update(weights_of(1), version="one", in_flight=in_flight)
            engine.audit()
            await stream.wait_finished()
            (first, old), (begun, new) = versions_of(request)
            assert (first, old, new) == (0, "", "one") and 5 <= begun < 40
            tokens = request.output_token_ids
            assert len(tokens) == 40
            prompt = [*PROMPTS[1], *tokens[:begun]]
            alone = await ended(engine, prompt, max_tokens=40 - begun)
            assert (alone.output_token_ids == tokens[begun:]) == (in_flight == "recompute")
            await queued.wait_finished()  # which computed nothing before
            assert queued.request.output_token_ids == expected[1][0]
            assert versions_of(queued.request) == [(0, "one")]
            assert engine.stats().counters.num_retractions == int(in_flight == "recompute")

    asyncio.run(run())


def test_requests_that_have_arrived_may_end_with_the_tokens_that_they_have() -> None:
    expected = answers_of(1)

    async def run() -> None:
        async with engine_of(0, max_running_requests=1) as engine:
            whole = await ended(engine, PROMPTS[1], max_tokens=40)
            stream = await midway(engine, salt="other")
            queued = engine.submit(PROMPTS[1], GREEDY)
            scored = asyncio.ensure_future(engine.vectors.logits([PROMPTS[1]], (1, 2)))
            await asyncio.sleep(0)
            await engine.weights.update(weights_of(1), in_flight="abort")
            for each in (stream, queued):
                await each.wait_finished()
                assert each.request.finish_reason is FinishReason.ABORT
            tokens = stream.request.output_token_ids
            assert 5 <= len(tokens) < 40 and tokens == whole.output_token_ids[: len(tokens)]
            assert queued.request.output_token_ids == []
            with pytest.raises(WeightsReplacedError):
                await scored
            assert await answers(engine) == expected

    asyncio.run(run())


def test_no_cached_prefix_outlives_its_weights(tmp_path: Path) -> None:
    tiers = {
        "host_cache": 0.01,
        "disk_cache": str(tmp_path),
        "num_pages": 24,
        "max_seq_len_override": 80,
    }

    async def run() -> None:
        async with engine_of(0, **tiers) as engine:
            prompt = PROMPTS[2]
            for version in ("one", "two"):
                assert (await ended(engine, prompt)).num_cached_tokens == 0
                assert (await ended(engine, prompt)).num_cached_tokens > 0
                for other in PROMPTS[1:3]:  # which push pages into host memory
                    await ended(engine, other[::-1], max_tokens=36)
                await engine.weights.update(weights_of(1), version=version)
            assert (await ended(engine, prompt)).num_cached_tokens == 0

    asyncio.run(run())


def test_an_update_that_fails_in_its_middle_leaves_an_engine_that_says_so() -> None:
    expected = answers_of(1)
    broken = weights_of(1) | {NORM: torch.full_like(weights_of(1)[NORM], torch.nan)}

    async def run() -> None:
        async with engine_of(0) as engine:
            stream = await midway(engine)
            with pytest.raises(CheckpointError, match=f"{NORM} has NaN or infinities"):
                await engine.weights.update(broken)
            with pytest.raises(WeightsIncompleteError):
                await stream.wait_finished()
            for _ in range(2):
                with pytest.raises(
                    WeightsIncompleteError, match="Allowed: another update"
                ) as refused:
                    engine.submit(PROMPTS[0], GREEDY)
            assert (refused.value.http_status, refused.value.code) == (503, "weights_incomplete")
            other = {name: tensor for name, tensor in weights_of(1).items() if name != NORM}
            await engine.weights.update(other, partial=True)
            with pytest.raises(WeightsIncompleteError):
                engine.submit(PROMPTS[0], GREEDY)
            await engine.weights.update({NORM: weights_of(1)[NORM]}, partial=True)
            assert await answers(engine) == expected

    asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=str)
def test_an_update_that_fails_before_its_first_number_changes_nothing(
    options: dict[str, int],
) -> None:
    broken = {NORM: torch.full_like(weights_of(1)[NORM], torch.nan)}

    async def run() -> None:
        async with engine_of(0, **options) as engine:
            expected = (await ended(engine, PROMPTS[1], max_tokens=40)).output_token_ids
            stream = await midway(engine, salt="other")
            with pytest.raises(CheckpointError, match="There is no group weights"):
                await engine.weights.update_from_group("weights", infos())
            with pytest.raises(CheckpointError, match=f"{NORM} has NaN or infinities"):
                await engine.weights.update(broken, partial=True)
            assert engine.weights.refusal is None
            await stream.wait_finished()
            assert stream.request.output_token_ids == expected

    asyncio.run(run())


async def check_goes_on(engine: AsyncEngine, stream: Any, begun: int) -> None:
    """The rest of the answer of `midway` is computed as that of a fresh request."""
    await stream.wait_finished()
    tokens = stream.request.output_token_ids
    alone = await ended(engine, [*PROMPTS[1], *tokens[:begun]], max_tokens=40 - begun)
    assert 5 <= begun < 40 and alone.output_token_ids == tokens[begun:]


def test_nothing_is_computed_before_weights_that_were_dropped_have_come() -> None:
    expected = answers_of(1)
    tensors = weights_of(1)
    others = {name: tensor for name, tensor in tensors.items() if name != NORM}

    async def run() -> None:
        async with engine_of(0, num_pages=200, max_running_requests=1) as engine:
            stream = await midway(engine, salt="other")
            queued, left = (engine.submit(PROMPTS[1], GREEDY) for _ in range(2))
            await engine.weights.sleep(2)
            begun, steps = stream.request.num_output_tokens, engine.stats().counters.num_steps
            await engine.weights.wake()
            await asyncio.sleep(0.1)
            await engine.weights.update({NORM: tensors[NORM]}, partial=True)
            with pytest.raises(CheckpointError, match="There is no group weights"):
                await engine.weights.update_from_group("weights", infos())
            await asyncio.sleep(0.1)
            assert engine.stats().counters.num_steps == steps
            left.abort()
            await left.wait_finished()
            await engine.weights.update(others, partial=True)
            await check_goes_on(engine, stream, begun)
            await queued.wait_finished()
            assert queued.request.output_token_ids == expected[1][0]

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_for_which_one_rank_has_no_room_leaves_no_rank_with_zeros(level: int) -> None:
    expected = answers_of(0, (("tp", 2),))

    async def run() -> None:
        async with engine_of(0, num_pages=200, tp=2) as engine:
            stream = await midway(engine)
            await engine.weights.begin()
            begun = stream.request.num_output_tokens
            with (
                mock.patch.object(sleeping, "_copied", side_effect=RuntimeError("too little")),
                pytest.raises(DeviceMemoryError, match="The host has no room"),
            ):
                await engine.weights.sleep(level)
            await engine.weights.finish()
            if level == 2:
                with pytest.raises(WeightsIncompleteError, match="were dropped"):
                    engine.submit(PROMPTS[0], GREEDY)
                await engine.weights.update_from_files(str(folder_of(0)))
            await check_goes_on(engine, stream, begun)
            assert await answers(engine) == expected

    asyncio.run(run())


def test_a_model_that_fails_to_sleep_or_to_wake_is_asleep_and_can_do_both_again() -> None:
    no_room = DeviceMemoryError("too little")

    async def run() -> None:
        async with engine_of(0, num_pages=200) as engine:
            taker = engine.weights._taker
            assert taker is not None
            slept = taker.sleep

            def sleep(drops_weights: bool) -> None:
                slept(drops_weights)
                raise no_room

            stream = await midway(engine)
            await engine.weights.begin()
            begun = stream.request.num_output_tokens
            with (
                mock.patch.object(taker, "sleep", sleep),
                mock.patch.object(taker, "wake", side_effect=no_room),
                pytest.raises(DeviceMemoryError),
            ):
                await engine.weights.sleep()
            await engine.weights.finish()
            with pytest.raises(AsleepError):
                engine.submit(PROMPTS[0], GREEDY)
            with (
                mock.patch.object(taker, "capture", side_effect=no_room),
                pytest.raises(DeviceMemoryError),
            ):
                await engine.weights.wake()
            await engine.weights.sleep(2)
            check_memory(engine)
            await engine.weights.wake()
            await check_goes_on(engine, stream, begun)

    asyncio.run(run())


def test_what_is_refused_changes_nothing() -> None:
    expected = answers_of(0)

    async def run() -> None:
        async with engine_of(0) as engine:
            wrong: list[tuple[dict[str, Any], type[MinisglError], str]] = [
                ({"tensors": {}}, CheckpointError, "lacks weights"),
                ({"tensors": weights_of(1), "version": ""}, InvalidRequestError, "version"),
                ({"tensors": weights_of(1), "in_flight": "stop"}, InvalidRequestError, "keep"),
            ]
            for given, kind, said in wrong:
                with pytest.raises(kind, match=said):
                    await engine.weights.update(**given)
            assert await answers(engine) == expected
            assert engine.weights.version == ""
        with pytest.raises(MinisglError, match="closed"):
            await engine.weights.update(weights_of(1))

    asyncio.run(run())


def test_an_llm_takes_the_tensors_of_a_trainer() -> None:
    files = DEMO_FOLDER.glob("*.safetensors")
    own = {name: tensor for file in files for name, tensor in load_file(file).items()}
    norm = own[NORM].flip(0)
    with LLM(device="cpu", num_pages=100) as llm:

        def answer(*versions: tuple[int, str]) -> list[int]:
            [output] = llm.generate("The capital of France is", GREEDY, progress=False)
            assert tuple(output.weight_versions) == versions
            return output.token_ids

        before = answer()
        trained = ((name, norm if name == NORM else tensor) for name, tensor in own.items())
        assert llm.update_weights(trained, version="step 1") == "step 1"
        assert answer((0, "step 1")) != before
        llm.update_weights({NORM: own[NORM]}, version="step 2", partial=True)
        assert answer((0, "step 2")) == before
        with pytest.raises(CheckpointError, match="lacks weights"):
            llm.update_weights({NORM: norm})
        assert answer((0, "step 2")) == before
        llm.sleep()
        with pytest.raises(AsleepError):
            answer()
        llm.wake_up(["kv_cache"])
        llm.wake_up()
        assert answer((0, "step 2")) == before


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_trainer_sends_weights_to_all_ranks_in_a_group(options: dict[str, int]) -> None:
    check_sent("gloo", "cpu", **options)


def test_a_trainer_that_is_killed_while_it_sends_leaves_an_engine_that_says_so() -> None:
    check_killed("gloo", "cpu")


def test_an_engine_that_waits_for_its_trainer_can_be_closed() -> None:
    check_closed("gloo", "cpu")


def test_a_group_over_nccl_is_refused_on_a_cpu() -> None:
    async def run() -> None:
        address = GroupAddress("127.0.0.1", 9, 1, 2, "weights", "nccl")
        async with engine_of(0) as engine:
            with pytest.raises(ConfigError, match="allowed on a CPU: gloo"):
                await engine.weights.join_group(address)

    asyncio.run(run())


def test_a_paused_engine_computes_nothing_until_it_resumes() -> None:
    expected = answers_of(1)

    async def run() -> None:
        async with engine_of(0) as engine:
            stream = await midway(engine)
            await engine.weights.pause()
            num_tokens = stream.request.num_output_tokens
            queued = engine.submit(PROMPTS[0], GREEDY)
            await engine.weights.update(weights_of(1))
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.stats().num_queued == 1
            assert stream.request.num_output_tokens == num_tokens
            await engine.weights.resume()
            await queued.wait_finished()
            assert queued.request.output_token_ids == expected[0][0]
            await stream.wait_finished()
            await engine.weights.pause("abort")
            await engine.weights.resume()
            with pytest.raises(InvalidRequestError, match="keep, recompute, abort"):
                await engine.weights.pause("stop")  # type: ignore[arg-type]

    asyncio.run(run())
