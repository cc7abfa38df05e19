"""Requests with images: their tokens are those of transformers, however the steps cut them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from support.checkpoints import load_reference
from support.image_cases import (
    GEMMA_3,
    GEMMA_4,
    LLAVA,
    PARAMS,
    PLACEHOLDER,
    QWEN,
    QWEN_3_VL,
    Asked,
    check,
    image_case,
    is_right,
    picture,
    prompt_logits,
    started,
    submitted,
)
from torch import Tensor

from minisgl.errors import InvalidRequestError, StepError
from minisgl.images.picture import with_pictures
from minisgl.models import lfm2, qwen_vl
from minisgl.models.towers.tower import Tower
from minisgl.parts.images.host import Pictured
from minisgl.parts.scores.host import scores_of
from minisgl.request import Request

FAMILIES = (LLAVA, QWEN, *qwen_vl.READERS, GEMMA_3, GEMMA_4, lfm2.WITH_TOWER)
BY_REQUEST = {"tp": 2, "dp_attention": True}
# So few that running requests have to be retracted.
FEW_PAGES = {"num_pages": 28, "page_size": 4, "schedule_conservativeness": 0.02}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"page_size": 16, "max_prefill_length": 7}, {"padded": 8, "speculative": "ngram"}],
    ids=str,
)
def test_tokens_equal_those_of_transformers(architecture: str, options: dict[str, Any]) -> None:
    if architecture == GEMMA_3 and "max_prefill_length" in options:
        options = options | {"max_prefill_length": 17}  # its images have 16 rows
    check(architecture, **options)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((each, options) for options in ({"tp": 2}, {"pp": 2}) for each in (QWEN, QWEN_3_VL)),
        *((each, BY_REQUEST) for each in (QWEN_3_VL, GEMMA_4)),
        (QWEN, {**BY_REQUEST, "padded": 8}),
    ],
    ids=str,
)
def test_ranks_and_stages_give_the_same_tokens(architecture: str, options: dict[str, Any]) -> None:
    """With a state, and rows for several layers; for rows that see each other, and rows of the
    first layer alone, see below."""
    check(architecture, max_prefill_length=7, **options)


def test_an_image_whose_rows_see_each_other_is_in_one_chunk() -> None:
    """Of the prompt as of what a hit within it leaves; one for which no step has room is
    refused."""
    first, second, *_ = of(GEMMA_3)
    (start, end), *_ = Pictured(first.spans).blocks
    assert (start, end) == (10, 26)
    pictured = Pictured(first.spans, keeps_whole=True)
    assert [pictured.chunk_end(end) for end in (9, 10, 11, 25, 26, 30)] == [9, 10, 10, 10, 26, 30]
    for page_size, cached in ((4, 24), (16, 0)):
        options = {"page_size": page_size, "max_prefill_length": 16}
        found, _ = check(GEMMA_3, alone=True, **options)
        assert found[4].num_cached_tokens == cached

    async def run() -> None:
        async with started(GEMMA_3, max_prefill_length=15) as engine:
            wanted = "takes 16 tokens in a row.* at most 15;.*--max-prefill-length"
            with pytest.raises(InvalidRequestError, match=wanted):
                await submitted(engine, second)

    asyncio.run(run())


def test_a_hit_may_end_inside_an_image_and_never_reaches_into_another() -> None:
    first, second, _, _, last = of(LLAVA)
    for page_size in (1, 4):
        found, _ = check(LLAVA, alone=True, page_size=page_size)
        for request, asked in ((found[1], second), (found[4], last)):
            same = np.array(first.prompt) == np.array(asked.prompt[: len(first.prompt)])
            common = int(np.argmin(same))
            assert request.num_cached_tokens == common // page_size * page_size
    span = last.spans[0]
    assert span.start + 9 < found[4].num_cached_tokens < span.end, "it ends elsewhere"


def test_few_rows_of_an_image_are_no_hit() -> None:
    """Their keys might be those of another."""
    first, *_, last = of(LLAVA)
    assert first.spans[0].start + 1 + 6 == 16 < first.spans[0].end

    async def run() -> list[int]:
        async with started(LLAVA, page_size=16) as engine:
            found = [await submitted(engine, each) for each in (first, last)]
            return [request.num_cached_tokens for request in found]

    assert asyncio.run(run()) == [0, 0]


def test_penalties_are_of_text() -> None:
    """Also where an image ends the prompt."""
    asked = of(LLAVA)[0]
    span = asked.spans[0]
    prompt = asked.prompt[: span.end - 1]
    picture = replace(
        span.picture, token_ids=span.picture.token_ids[:-1], is_row=span.picture.is_row[:-1]
    )
    ending = replace(asked, prompt=prompt, spans=(replace(span, picture=picture),))
    text = asked.prompt[: span.start]

    async def run() -> None:
        async with started(LLAVA) as engine:
            params = replace(PARAMS, repetition_penalty=1e6)
            found = await submitted(engine, ending, params=params)
            assert {*found.output_token_ids}.isdisjoint({*text, 90})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("architecture", "options"), [(LLAVA, {}), (QWEN_3_VL, {}), (GEMMA_4, {"pp": 2})], ids=str
)
def test_the_text_around_images_has_logprobs_and_their_rows_have_none(
    architecture: str, options: dict[str, Any]
) -> None:
    """Logprobs also show whether the rows of an image see each other on each stage."""
    case = image_case(architecture)
    asked = case.asked[2]
    reference = load_reference(case.folder, getattr(transformers, architecture))
    wanted = prompt_logits(reference, asked).log_softmax(-1)

    async def run() -> Request:
        async with started(architecture, max_prefill_length=7, **options) as engine:
            params = replace(PARAMS, prompt_logprobs=1)
            jobs = [submitted(engine, each) for each in case.asked]
            found = await asyncio.gather(submitted(engine, asked, params=params), *jobs)
            assert all(map(is_right, [asked, *case.asked], found))
            return found[0]

    scores = scores_of(asyncio.run(run()))
    assert len(scores) == len(asked.prompt) - 1
    for row, (token_id, scored) in enumerate(zip(asked.prompt[1:], scores, strict=True)):
        assert (scored is None) == (token_id < 0)
        if scored is not None:
            assert scored.token_id == token_id
            assert abs(scored.logprob - float(wanted[row, token_id])) < 1e-3
            assert scored.top[0][0] == int(wanted[row].argmax())


def test_a_state_goes_on_behind_an_image() -> None:
    found, _ = check(QWEN, alone=True, times=2, page_size=1)
    for request, asked in zip(found[5:], of(QWEN), strict=True):
        assert request.num_cached_tokens == len(asked.prompt) - 1


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_retracted_request_finds_its_images_again(architecture: str) -> None:
    """Also with a buffer that holds no more than one request needs."""
    rows = max(sum(each.picture.num_rows for each in asked.spans) for asked in of(architecture))
    _, stats = check(architecture, image_rows=rows, cache_type="naive", **FEW_PAGES)
    assert stats.counters.num_retractions


def of(architecture: str) -> list[Asked]:
    return image_case(architecture).asked


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The images that are encoded, in their order."""
    found: list[bytes] = []
    rows = Tower.rows

    def noting(self: Tower, inputs: Mapping[str, np.ndarray]) -> Tensor:
        found.append(b"".join(array.tobytes() for array in inputs.values()))
        return rows(self, inputs)

    monkeypatch.setattr(Tower, "rows", noting)
    return found


def test_an_image_is_encoded_once_for_all_who_may_share_it(encoded: list[bytes]) -> None:
    check(LLAVA)
    assert len(encoded) == len({*encoded}) == 3

    async def apart() -> None:
        async with started(LLAVA) as engine:
            asked = of(LLAVA)[0]
            jobs = [submitted(engine, asked, cache_salt=salt) for salt in ("a", "b", "a")]
            assert all(is_right(asked, each) for each in await asyncio.gather(*jobs))

    encoded.clear()
    asyncio.run(apart())
    assert len(encoded) == 2


def test_an_image_that_cannot_be_encoded_ends_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = of(LLAVA)
    broken = asked[1].spans[0].picture
    rows = Tower.rows

    def breaking(self: Tower, inputs: Mapping[str, np.ndarray]) -> Tensor:
        if inputs["pixel_values"].tobytes() == broken.inputs["pixel_values"].tobytes():
            raise RuntimeError("out of luck")
        return rows(self, inputs)

    monkeypatch.setattr(Tower, "rows", breaking)

    async def run() -> None:
        async with started(LLAVA) as engine:
            jobs = [submitted(engine, each) for each in asked]
            found = await asyncio.gather(*jobs, return_exceptions=True)
            for each, result in zip(asked, found, strict=True):
                if any(span.picture is broken for span in each.spans):
                    assert isinstance(result, StepError) and "out of luck" in str(result)
                else:
                    assert not isinstance(result, BaseException) and is_right(each, result)
            assert not engine.stats().num_running + engine.stats().num_queued

    asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_an_image_that_one_stage_cannot_encode_ends_its_own_requests(
    options: dict[str, Any],
) -> None:
    """Only the first stage has a tower, and only the last one tells the scheduler."""
    right = of(LLAVA)[0]
    whole = right.spans[0].picture
    fewer = picture(dict(whole.inputs), whole.num_rows - 1)
    fewer = replace(fewer, digest=b"another one")
    prompt, spans = with_pictures([5, PLACEHOLDER, 6], PLACEHOLDER, [fewer])
    wrong = replace(right, prompt=prompt, spans=spans)

    async def run() -> None:
        async with started(LLAVA, **options) as engine:
            jobs = [submitted(engine, each) for each in (wrong, right, wrong)]
            found = await asyncio.gather(*jobs, return_exceptions=True)
            for failed in (found[0], found[2]):
                assert isinstance(failed, StepError), failed
                assert "rows, and" in str(failed)
            assert isinstance(found[1], Request) and is_right(right, found[1])
            assert is_right(right, await submitted(engine, right))
            engine.audit()

    asyncio.run(run())


def test_what_cannot_run_is_refused_when_it_is_submitted() -> None:
    asked = of(LLAVA)[2]

    async def run() -> None:
        async with started(LLAVA, image_rows=47) as engine:
            with pytest.raises(
                InvalidRequestError, match=r"the images take 48 tokens.*--image-rows"
            ):
                await submitted(engine, asked)
            one = of(LLAVA)[0]
            with pytest.raises(InvalidRequestError, match="out of vocabulary"):
                engine.submit(one.prompt, PARAMS)
            for moved in (one.prompt[1:], [1, *one.prompt], one.prompt[: one.spans[0].end - 2]):
                with pytest.raises(InvalidRequestError, match="other tokens than those of its"):
                    engine.submit(moved, PARAMS, extras=[Pictured(one.spans)])
            assert is_right(one, await submitted(engine, one))
        async with started(LLAVA, image_rows=0) as engine:
            with pytest.raises(InvalidRequestError, match=r"takes no images: .*--image-rows 0"):
                await submitted(engine, asked)

    asyncio.run(run())
