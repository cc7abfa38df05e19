"""Requests with images beside what else an engine has: memories behind the device, other engines,
adapters, drafts and masks. Their tokens are those of transformers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.adapted_requests import write_merged
from support.checkpoints import load_reference
from support.image_cases import (
    LLAVA,
    NUM_TOKENS,
    PARAMS,
    PLACEHOLDER,
    QWEN,
    QWEN_3_VL,
    Asked,
    answered,
    image_case,
    is_right,
    started,
    submitted,
)

from minisgl.engine.stream import OutputStream
from minisgl.errors import CheckpointError
from minisgl.kvcache.copies import LoadRule
from minisgl.models.towers.tower import Tower
from minisgl.parts.images.host import ImagePlan, Pictured
from minisgl.request import Request
from minisgl.runner.runner import ModelRunner
from minisgl.scheduler.plan import StepPlan

PAGE_SIZE = 4
# Room on the device for the longest prompt and little more, so that others fall out.
FEW: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "num_pages": 26,
    "max_seq_len_override": 100,
    "host_cache": 0.01,
}
# How the names of what is not the text part begin in a checkpoint.
TOWERS = ("model.vision_tower", "model.multi_modal_projector", "model.visual")
STATES = {QWEN: {"state_cache": 0.01}}


@pytest.fixture(autouse=True)
def any_hit_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadRule, "pays", lambda *pages: True)


def of(architecture: str) -> list[Asked]:
    return image_case(architecture).asked


async def ask_all(architecture: str, **options: Any) -> tuple[list[Request], int]:
    """All prompts of a case, one after the other and then again; and how many tokens came from
    disk."""
    asked = of(architecture) * 2
    async with started(architecture, **FEW, **STATES.get(architecture, {}), **options) as engine:
        found = [await submitted(engine, each) for each in asked]
        engine.audit()
        assert all(map(is_right, asked, found))
        return found, engine.stats().counters.num_disk_tokens


@pytest.mark.parametrize("architecture", [LLAVA, QWEN, QWEN_3_VL])
def test_images_come_back_from_host_memory(architecture: str) -> None:
    found, _ = asyncio.run(ask_all(architecture))
    for request, asked in zip(found[5:], of(architecture), strict=True):
        assert request.num_cached_tokens == (len(asked.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    behind = [
        request
        for request in found[5:]
        if (pictured := request.extra(Pictured)) is not None
        and request.num_host_tokens > pictured.spans[0].start
    ]
    assert behind, "no image came from host memory"


def test_a_hit_in_host_memory_may_end_inside_an_image() -> None:
    first, other, *_, last = of(LLAVA)

    async def run() -> tuple[Request, Request]:
        async with started(LLAVA, **FEW) as engine:
            for each in (
                first,
                of(LLAVA)[2],
                of(LLAVA)[3],
            ):  # of which the others push the first out
                assert is_right(each, await submitted(engine, each))
            found = [await submitted(engine, each) for each in (other, last)]
            assert is_right(other, found[0]) and is_right(last, found[1])
            return found[0], found[1]

    another, same = asyncio.run(run())
    span = last.spans[0]
    assert (
        another.num_cached_tokens == another.num_host_tokens == span.start // PAGE_SIZE * PAGE_SIZE
    )
    assert span.start + 8 < same.num_cached_tokens < span.end
    assert same.num_host_tokens > span.start


@pytest.mark.parametrize("architecture", [LLAVA, QWEN])
def test_images_are_found_on_disk_after_a_restart(architecture: str, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    first, _ = asyncio.run(ask_all(architecture, disk_cache=disk))
    again, num_disk_tokens = asyncio.run(ask_all(architecture, disk_cache=disk))
    assert first[0].num_cached_tokens == 0 < num_disk_tokens
    for request, asked in zip(again, of(architecture) * 2, strict=True):
        assert request.num_cached_tokens == (len(asked.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        if asked.spans:
            assert request.num_cached_tokens > asked.spans[-1].end - PAGE_SIZE


@pytest.mark.parametrize("architecture", [LLAVA, QWEN_3_VL])
def test_another_engine_goes_on_behind_images(architecture: str, tmp_path: Path) -> None:
    """As those of --roles: one computes the prompt, the other generates."""
    asked = of(architecture)[2]
    extras = (Pictured(asked.spans),)

    async def run() -> None:
        options = {**FEW, "num_pages": 60}
        async with (
            started(architecture, **options) as prefill,
            started(architecture, **options) as decode,
        ):
            address = await prefill.pages.share(str(tmp_path / "prefill"), always_load=True)
            await decode.pages.share(str(tmp_path / "decode"), always_load=True)
            assert await prefill.pages.offer(asked.prompt, extras=extras)
            assert await decode.pages.fetch(address, asked.prompt, extras=extras)
            found = await submitted(decode, asked)
            assert is_right(asked, found)
            assert found.num_cached_tokens == (len(asked.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
            for engine in (prefill, decode):
                engine.audit()

    asyncio.run(run())


@pytest.mark.parametrize("architecture", [LLAVA, QWEN_3_VL])
def test_an_adapter_of_the_text_part_changes_answers_about_images(
    architecture: str, tmp_path: Path
) -> None:
    case = image_case(architecture)
    reference = load_reference(case.folder, getattr(transformers, architecture))
    write_merged(reference, tmp_path / "adapter", rank=3, seed=1, within="language_model")
    plain = case.asked[:3]
    adapted = [answered(reference, each.prompt, each.spans) for each in plain]
    assert any(a.token_ids != b.token_ids for a, b in zip(plain, adapted, strict=True))

    async def run() -> None:
        options = {"lora": (f"a={tmp_path / 'adapter'}",), "max_prefill_length": 7}
        async with started(architecture, **options) as engine:
            asked = [*plain, *adapted, *plain, *adapted]
            extras = [*[()] * 3, *[(engine.adapter("a"),)] * 3] * 2
            jobs = [
                submitted(engine, each, extras=given)
                for each, given in zip(asked, extras, strict=True)
            ]
            found = await asyncio.gather(*jobs)
            engine.audit()
            assert all(map(is_right, asked, found))

    asyncio.run(run())


def test_drafts_are_of_requests_without_images() -> None:
    asked = of(LLAVA)
    text = replace(asked[3], prompt=[5, 6, 7, 8] * 6)

    async def run() -> None:
        async with started(LLAVA, speculative="ngram", padded=8) as engine:
            params = replace(PARAMS, max_tokens=40)
            jobs = [submitted(engine, each) for each in asked]
            jobs.append(submitted(engine, text, params=params))
            *found, of_text = await asyncio.gather(*jobs)
            assert all(map(is_right, asked, found))
            for each, request in zip(asked, found, strict=True):
                assert not (each.spans and request.num_drafted_tokens)
            assert of_text.num_drafted_tokens

    asyncio.run(run())


@pytest.mark.parametrize("architecture", [LLAVA, QWEN])
def test_masks_are_of_requests_with_images_too(architecture: str) -> None:
    """Beside others without masks, in deferred steps."""
    allowed = [*range(11, 60, 7)]
    asked = of(architecture)
    reference = load_reference(image_case(architecture).folder, getattr(transformers, architecture))
    head = reference.get_output_embeddings()
    mask = torch.full((head.weight.shape[0],), -torch.inf)
    mask[allowed] = 0
    head.register_forward_hook(lambda module, args, logits: logits + mask)
    masked = [answered(reference, each.prompt, each.spans) for each in asked[:3]]

    async def run() -> None:
        async with started(architecture, max_prefill_length=7) as engine:
            params = replace(PARAMS, allowed_token_ids=allowed)
            jobs = [submitted(engine, each, params=params) for each in masked]
            jobs += [submitted(engine, each) for each in asked]
            found = await asyncio.gather(*jobs)
            assert all(map(is_right, [*masked, *asked], found))
            assert {token for each in found[:3] for token in each.output_token_ids} <= {*allowed}

    asyncio.run(run())


def test_the_placeholder_may_be_sampled() -> None:
    """As a token of text, of which no step makes an image."""
    asked = of(LLAVA)[0]

    async def run() -> None:
        async with started(LLAVA) as engine:
            params = replace(PARAMS, logit_bias=None, allowed_token_ids=[PLACEHOLDER])
            found = await submitted(engine, asked, params=params)
            assert found.output_token_ids == [PLACEHOLDER] * NUM_TOKENS
            assert is_right(asked, await submitted(engine, asked))

    asyncio.run(run())


def test_requests_that_leave_at_any_moment_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while their image is encoded, which the next one may be waiting for."""
    asked = of(LLAVA)
    pictured = [each for each in asked if each.spans]
    leaving: list[OutputStream] = []
    rows = Tower.rows

    def noting(self: Tower, inputs: Any) -> Any:
        loop.call_soon_threadsafe(lambda: leaving.pop().abort() if leaving else None)
        return rows(self, inputs)

    monkeypatch.setattr(Tower, "rows", noting)
    loop: Any = None

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with started(LLAVA, max_prefill_length=7, image_rows=48) as engine:
            for num_deltas in range(4):
                streams = [
                    engine.submit(each.prompt, PARAMS, extras=[Pictured(each.spans)])
                    for each in pictured
                ]
                leaving.append(streams[-1])
                jobs = [submitted(engine, each) for each in asked]
                for stream in streams[:-1]:
                    for _ in range(num_deltas):
                        await anext(stream)
                        engine.audit()
                    stream.abort()
                    engine.audit()
                found = await asyncio.gather(*jobs)
                assert all(map(is_right, asked, found))
                leaving.clear()
                streams[-1].abort()
            stats = engine.stats()
            assert not stats.num_running + stats.num_queued
            assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
            engine.audit()

    asyncio.run(run())


def test_steps_without_images_are_those_of_a_model_that_reads_text_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = of(QWEN_3_VL)[3]

    def plans(**options: Any) -> list[StepPlan]:
        found: list[StepPlan] = []
        launch = ModelRunner.launch

        def noting(self: ModelRunner, plan: StepPlan, *others: Any) -> Any:
            found.append(plan)
            return launch(self, plan, *others)

        async def run() -> None:
            async with started(QWEN_3_VL, **options) as engine:
                found.clear()  # those of the start
                assert is_right(text, await submitted(engine, text))

        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "launch", noting)
            asyncio.run(run())
        return found

    seeing, blind = plans(), plans(image_rows=0)
    assert [plan.part(ImagePlan) for plan in seeing] == [None] * len(seeing)
    assert [replace(plan, joins=()) for plan in seeing] == [
        replace(plan, joins=()) for plan in blind
    ]


@pytest.mark.parametrize("architecture", [LLAVA, QWEN_3_VL])
def test_weights_of_the_text_part_and_of_the_tower_are_replaced(architecture: str) -> None:
    """Also its embedding, in whose places the rows of images are. What is not given of the tower
    stays, and rows of images that other weights have made are not read again."""
    case = image_case(architecture)
    asked = case.asked[:3]
    reference = load_reference(case.folder, getattr(transformers, architecture))
    for module in (reference.get_input_embeddings(), reference.get_output_embeddings()):
        weight = module.weight.detach()
        weight.copy_(weight.roll(1, dims=0))
    of_text = {name: each.clone() for name, each in reference.state_dict().items()}
    of_text = {name: each for name, each in of_text.items() if not name.startswith(TOWERS)}
    changed = [answered(reference, each.prompt, each.spans) for each in asked]
    of_tower = {name: each for name, each in reference.state_dict().items() if name not in of_text}
    for weight in of_tower.values():
        weight.copy_(weight.roll(1, dims=0))
    seen = [answered(reference, each.prompt, each.spans) for each in asked]
    for before, after in ((asked, changed), (changed, seen)):
        assert any(a.token_ids != b.token_ids for a, b in zip(before, after, strict=True))
    first = next(iter(of_tower))

    async def run() -> None:
        async with started(architecture) as engine:

            async def check(wanted: Sequence[Asked]) -> None:
                found = await asyncio.gather(*(submitted(engine, each) for each in wanted))
                assert all(map(is_right, wanted, found))

            await check(asked)
            await engine.weights.update(of_text)
            await check(changed)
            await engine.weights.update(of_tower, partial=True)
            await check(seen)
            for wrong in ({f"{first}.more": of_tower[first]}, {first: of_tower[first][:1]}):
                with pytest.raises(CheckpointError, match=re.escape(first)):
                    await engine.weights.update(wrong, partial=True)
            assert await engine.weights.read(first, 1) == of_tower[first][:1].tolist()
            await check(seen)
            engine.audit()

    asyncio.run(run())
