"""The whole engine with networks that draft, in float32: tokens do not change, and drafts are those
of plain torch over whole sequences."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.checkpoints import load_reference, spec_named
from support.draft_networks import (
    Head,
    HeadReference,
    Mtp,
    drafts_after,
    hybrid,
    latent,
    save_head,
)
from support.parity import FEW_PAGES, batch, case_of, load_engine

from minisgl.config import EngineConfig
from minisgl.drafting.drafter import DraftStep
from minisgl.drafting.network_drafter import NetworkDrafter, _Ahead
from minisgl.engine import AsyncEngine
from minisgl.errors import ConfigError
from minisgl.kvcache.radix import RadixCache
from minisgl.request import SamplingParams
from minisgl.runner.setup import read_setup
from minisgl.scheduler.plan import StepResult
from minisgl.scheduler.scheduler import Scheduler

_FOLDER = TemporaryDirectory()
PATH = Path(_FOLDER.name)
CASE = "qwen3"  # of three layers
PARAMS = [
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=9, max_tokens=18, ignore_eos=True),
]
DP: dict[str, Any] = {"tp": 2, "dp_attention": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"page_size": 1, "max_prefill_length": 7},
    "padded": {"padded": 4},
    "no-overlap": {"overlap": False},
    "few-pages": FEW_PAGES,
    "ranks": {"tp": 2},
    "requests": {**DP, "max_prefill_length": 16, "padded": 2},
}
ON_RANKS = ("ranks", "requests")


@dataclass
class Verified:
    """What the steps of an engine have drafted and verified."""

    num_drafted: int = 0
    num_accepted: int = 0
    retractions: int = 0
    has_window_pages: bool = False
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # tokens of each prompt
    # The length of the prompt, of what is computed of the request, and the drafts behind that and
    # the last token.
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: Any, **options: Any) -> Verified:
    found, settle, draft = Verified(), Scheduler.settle, NetworkDrafter.draft

    def noting_drafts(self: NetworkDrafter, step: DraftStep, *args: Any) -> None:
        draft(self, step, *args)
        state = step.state
        for slot in step.ending_slots().tolist():
            if slot != state.scratch_slot:
                lengths = int(state.prompt_lengths[slot]), int(state.lengths[slot])
                found.drafts.append((*lengths, state.drafts[slot, : step.run - 1].tolist()))

    def noting(scheduler: Scheduler, result: StepResult, *args: Any) -> Any:
        for length, drafted in zip(result.run_lengths or (), result.num_drafted or (), strict=True):
            found.num_drafted += drafted
            found.num_accepted += length - 1
        return settle(scheduler, result, *args)

    async def answer() -> None:
        loaded = load_engine(folder, **options)
        found.has_window_pages = loaded.capacity.num_window_pages > 0
        async with AsyncEngine(loaded) as engine:
            params = [PARAMS[index % len(PARAMS)] for index in range(len(prompts))]
            outputs = await batch(engine, prompts, params)
            found.answers = [output.token_ids for output in outputs]
            found.cached = [output.num_cached_tokens for output in outputs]
            found.retractions = engine.stats().counters.num_retractions

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "settle", noting)
        patch.setattr(NetworkDrafter, "draft", noting_drafts)
        asyncio.run(answer())
    return found


# So few requests at once that windowed layers have pages of their own.
WINDOWS: dict[str, Any] = {"page_size": 4, "max_running_requests": 2, "max_prefill_length": 7}


@pytest.mark.parametrize("options", [{}, DP | {"num_pages": 40}, {"padded": 2}], ids=str)
def test_drafts_of_windowed_layers_have_the_pages_of_the_model(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Of requests that are longer than the window, each page of which a draft could lack."""
    case, options = case_of("gpt-oss"), WINDOWS | options
    options |= {"speculative": str(case.folder), "draft_tokens": 3}
    found = run(monkeypatch, case.folder, case.prompts[2:], **options)
    assert found.has_window_pages
    assert found.answers == answers("gpt-oss", 2)
    assert found.num_drafted == found.num_accepted > 25


HEAD = Head(spec_named(CASE), taps=(0, 1, 2))


@cache
def head() -> Path:
    return save_head(HEAD, PATH / "head")


@cache
def small() -> Path:
    return case_of("qwen3-biased").folder


def drafter(kind: str) -> str:
    return str(head() if kind == "eagle3" else small())


# Models draft what is right in every run below; here, what is wrong.
@pytest.mark.parametrize(
    ("kind", "name", "num_drafts"),
    [
        *(("eagle3", name, 3) for name in OPTIONS),
        *(("eagle3", "plain", num) for num in (1, 7)),
        *(("model", name, 3) for name in ("padded", "few-pages")),
    ],
)
def test_no_drafter_changes_a_token(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_drafts: int, name: str
) -> None:
    """Heads draft for greedy requests as in plain torch; for few pages see below."""
    case = case_of(CASE)
    drafting = {"speculative": drafter(kind), "draft_tokens": num_drafts}
    found = run(monkeypatch, case.folder, case.prompts, **drafting, **OPTIONS[name])
    assert found.answers == answers()
    assert found.num_drafted > 0
    assert (found.retractions > 0) == (name == "few-pages")
    if kind == "eagle3" and num_drafts == 3 and name != "few-pages":
        prompts = case.prompts[:: len(PARAMS)]
        found.answers = found.answers[:: len(PARAMS)]
        oracle = HeadReference(HEAD, load_reference(case.folder))
        check_drafts(found, oracle, prompts, num_drafts, every=1)


@cache
def answers(name: str = CASE, first: int = 0) -> list[list[int]]:
    """Without drafts, to the prompts from that one on."""
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, case_of(name).folder, case_of(name).prompts[first:]).answers


FP8_CACHE: dict[str, Any] = {"kv_cache_dtype": "fp8"}
HOST_CACHE: dict[str, Any] = {"host_cache": 0.01, **FEW_PAGES}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("eagle3", {"quantization": "fp8"}, id="eagle3-fp8"),
        pytest.param("eagle3", FP8_CACHE, id="eagle3-fp8-cache"),
        pytest.param("eagle3", HOST_CACHE, id="eagle3-host-cache"),
        pytest.param("mtp", FP8_CACHE, id="mtp-fp8-cache"),
        pytest.param("mtp", HOST_CACHE, id="mtp-host-cache"),
    ],
)
def test_a_drafter_works_with_every_form_of_weights_and_caches(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    folder, prompts = case_of(CASE).folder, case_of(CASE).prompts
    if kind == "mtp":
        _, folder = latent("glm-flash")
    expected = run(monkeypatch, folder, prompts, **options)
    drafting = {"speculative": str(head()) if kind == "eagle3" else kind, "draft_tokens": 3}
    found = run(monkeypatch, folder, prompts, **drafting, **options)
    assert found.answers == expected.answers and found.num_drafted > 0


@pytest.mark.parametrize(
    ("model", "name", "num_drafts"),
    [
        (CASE, "plain", 7),
        *((CASE, name, 3) for name in ("chunks", "few-pages", "ranks", "requests")),
        ("glm-flash", "plain", 3),
    ],
)
def test_all_drafts_of_the_model_itself_are_accepted(
    monkeypatch: pytest.MonkeyPatch, model: str, num_drafts: int, name: str
) -> None:
    """Greedy and sampled: the drafts have the noise of their own places."""
    case = case_of(model)
    drafting = {"speculative": str(case.folder), "draft_tokens": num_drafts}
    found = run(monkeypatch, case.folder, case.prompts, **drafting, **OPTIONS[name])
    assert found.answers == answers(model)
    assert found.num_drafted == found.num_accepted > 25


def test_stages_of_a_pipeline_take_no_drafter_with_weights() -> None:
    with pytest.raises(ConfigError, match="with --pp allowed: ngram"):
        load_engine(case_of(CASE).folder, speculative=str(head()), pp=2)


def test_pages_with_the_kv_of_another_drafter_are_told_apart() -> None:
    folder = case_of(CASE).folder
    prints = {
        read_setup(EngineConfig(model=str(folder), device="cpu", speculative=name)).fingerprint()
        for name in (None, "ngram", str(head()), str(small()))
    }
    assert len(prints) == 3  # n-grams leave no KV


def check_drafts(
    found: Verified, oracle: HeadReference | Mtp, prompts: Any, num_drafts: int, every: int = 2
) -> None:
    """Compare some drafts with the greedy ones of plain torch, up to one without a page. What a run
    has left behind the end of a request is left out."""
    requests = zip(prompts, found.answers, strict=True)
    known = {len(prompt): prompt + answer for prompt, answer in requests}
    num_compared = 0
    for prompt, length, drafts in found.drafts[::every]:
        tokens = known.get(prompt, [])[: length + 1]  # of none: the trial of the largest step
        if len(tokens) <= length or not drafts:
            continue
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        assert drafts == drafts_after(oracle, tokens, num_drafts)[: len(drafts)]
        num_compared += len(drafts)
    assert num_compared > 20


def test_heads_draft_with_few_pages_as_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(CASE)
    monkeypatch.setattr(f"{__name__}.PARAMS", PARAMS[:1])
    drafting = {"speculative": str(head()), "draft_tokens": 3}
    found = run(monkeypatch, case.folder, case.prompts, **drafting, **FEW_PAGES)
    check_drafts(found, HeadReference(HEAD, load_reference(case.folder)), case.prompts, 3)


def test_chunks_that_sample_nothing_leave_what_later_drafts_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(CASE)
    monkeypatch.setattr(f"{__name__}.PARAMS", PARAMS[:1])
    drafting = {"speculative": str(head()), "draft_tokens": 3, "max_running_requests": 1}
    prompts = case.prompts[3:5]
    found = run(monkeypatch, case.folder, prompts, **drafting, max_prefill_length=7)
    check_drafts(found, HeadReference(HEAD, load_reference(case.folder)), prompts, 3)


def found_after_hits(monkeypatch: pytest.MonkeyPatch, page_size: int) -> tuple[Verified, Any]:
    """Prompts that leave the first one after 32 tokens."""
    case = case_of(CASE)
    monkeypatch.setattr(f"{__name__}.PARAMS", PARAMS[:1])
    first = case.prompts[3][:39]
    prompts = [first, *(first[:32] + [number] * number for number in (1, 2, 3))]
    drafting = {"speculative": str(head()), "draft_tokens": 3}
    return (
        run(
            monkeypatch,
            case.folder,
            prompts,
            **drafting,
            page_size=page_size,
            max_running_requests=1,
        ),
        prompts,
    )


@pytest.mark.parametrize("page_size", [1, 8])
def test_drafts_after_a_prefix_hit_are_those_without(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """The match ends a page before the deepest one."""
    found, prompts = found_after_hits(monkeypatch, page_size)
    assert found.cached == [0, *[32 - page_size] * 3]
    check_drafts(found, HeadReference(HEAD, load_reference(case_of(CASE).folder)), prompts, 3)


# -- mistakes that must show ----------------------------------------------------------------------


def _position_of_next(monkeypatch: pytest.MonkeyPatch) -> None:
    over = NetworkDrafter._over_step

    def shifted(self: NetworkDrafter, step: DraftStep, token_ids: Any) -> Any:
        own = step.batch.own
        own = dataclasses.replace(own, rope=own.rope + 1)
        batch = dataclasses.replace(step.batch, own=own)
        return over(self, dataclasses.replace(step, batch=batch), token_ids)

    monkeypatch.setattr(NetworkDrafter, "_over_step", shifted)


def _hidden_of_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_rows(step: DraftStep) -> Any:
        rows = step.num_decode_rows
        ends = torch.arange(0, rows, step.run) + step.run - 1
        return ends if step.sample_rows is None else torch.cat((ends, step.sample_rows[rows:]))

    monkeypatch.setattr(DraftStep, "ending_rows", last_rows)


def _own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftStep, "next_tokens", lambda step, token_ids: step.batch.token_ids)


def _stay_where_prompt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    init = _Ahead.__init__
    monkeypatch.setattr(
        _Ahead,
        "__init__",
        lambda self, step, slots, lengths, *given: init(self, step, slots, lengths - 1, *given),
    )


MISTAKES = (_position_of_next, _hidden_of_last_row, _own_tokens, _stay_where_prompt_ends)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_drafter_shows(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    case = case_of(CASE)
    monkeypatch.setattr(f"{__name__}.PARAMS", PARAMS[:1])
    mistake(monkeypatch)
    prompts = case.prompts[:2]
    found = run(monkeypatch, case.folder, prompts, speculative=str(head()), draft_tokens=3)
    assert found.answers == answers()[:1] + found.answers[1:]
    with pytest.raises(AssertionError):
        check_drafts(found, HeadReference(HEAD, load_reference(case.folder)), prompts, 3)


def test_a_match_to_the_deepest_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    useful = RadixCache._num_useful

    def deepest(self: RadixCache, *args: Any) -> int:
        self.num_spared = 0
        return useful(self, *args)

    monkeypatch.setattr(RadixCache, "_num_useful", deepest)
    found, prompts = found_after_hits(monkeypatch, 8)
    assert found.cached == [0, 32, 32, 32]
    with pytest.raises(AssertionError):
        check_drafts(found, HeadReference(HEAD, load_reference(case_of(CASE).folder)), prompts, 3)


# -- layers for multi-token prediction: of models with states, and over latents -------------------

HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
LATENTS = ("deepseek-v3", "glm-flash")
LENGTHS = (3, 17, 40, 41, 9)


def folder_of(name: str) -> Path:
    return hybrid(name)[1] if name in HYBRIDS else latent(name)[1]


def mtp_prompts() -> list[list[int]]:
    """Those of 40 and 41 tokens share a beginning."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(499, (39,), generator=generator).tolist()
    own = [torch.randint(499, (length,), generator=generator).tolist() for length in LENGTHS]
    return [(shared + each)[: len(each)] if len(each) > 39 else each for each in own]


@cache
def mtp_answers(model: str) -> list[list[int]]:
    """Without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, folder_of(model), mtp_prompts()).answers


def guess_at_times(monkeypatch: pytest.MonkeyPatch, answers: list[list[int]]) -> None:
    """Let drafts be what is answered, but for some that are wrong."""
    known = {
        len(prompt): prompt + answer for prompt, answer in zip(mtp_prompts(), answers, strict=True)
    }
    draft = NetworkDrafter.draft

    def guess(self: NetworkDrafter, step: DraftStep, *args: Any) -> None:
        draft(self, step, *args)
        state, num = step.state, step.run - 1
        for slot in step.ending_slots().tolist():
            length = int(state.lengths[slot])
            after = known.get(int(state.prompt_lengths[slot]), [])[length + 1 :]
            guessed = (after + [0] * num)[:num]
            guessed = [
                token if hash((slot, length, place)) % 10 < 7 else 0
                for place, token in enumerate(guessed)
            ]
            state.drafts[slot, :num] = torch.tensor(guessed, dtype=torch.int32)

    monkeypatch.setattr(NetworkDrafter, "draft", guess)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((HYBRIDS[0], name) for name in OPTIONS if name not in ON_RANKS),
        *((LATENTS[1], name) for name in ("chunks", "padded", "few-pages")),
    ],
)
def test_drafts_that_are_right_at_times_change_no_token(
    monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    """States advance by what counts, and pages have the latents of that."""
    folder, prompts, expected = folder_of(model), mtp_prompts(), mtp_answers(model)
    guess_at_times(monkeypatch, expected)
    for num_drafts in (1, 3):
        drafting = {"speculative": "mtp", "draft_tokens": num_drafts}
        found = run(monkeypatch, folder, prompts, **drafting, **OPTIONS[name])
        assert found.answers == expected
        assert 12 < found.num_accepted < found.num_drafted - 6


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (HYBRIDS[1], {"tp": 2}),
        (HYBRIDS[1], DP),
        (LATENTS[0], {"tp": 2}),
        (LATENTS[1], {"tp": 2, "ep": True}),
    ],
    ids=str,
)
def test_ranks_divide_a_layer_that_drafts(
    monkeypatch: pytest.MonkeyPatch, model: str, split: dict[str, Any]
) -> None:
    folder, prompts = folder_of(model), mtp_prompts()
    drafting = {"speculative": "mtp", "draft_tokens": 3}
    found = run(monkeypatch, folder, prompts, **drafting, **split)
    assert found.answers == mtp_answers(model) and found.num_accepted > 0
    if split != DP:  # of which the steps are others
        alone = run(monkeypatch, folder, prompts, **drafting)
        assert found.drafts == alone.drafts and any(drafts for *_, drafts in found.drafts)


@pytest.mark.parametrize("name", [*HYBRIDS, *LATENTS])
def test_layers_of_a_model_draft_in_the_engine_as_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mtp, folder = hybrid(name) if name in HYBRIDS else latent(name)
    monkeypatch.setattr(f"{__name__}.PARAMS", PARAMS[:1])
    drafting = {"speculative": "mtp", "draft_tokens": 3}
    found = run(monkeypatch, folder, mtp_prompts(), **drafting, max_prefill_length=20)
    check_drafts(found, mtp, mtp_prompts(), 3)


async def test_the_start_says_that_a_layer_of_the_checkpoint_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With made-up weights, which need no tokenizer."""
    options: dict[str, Any] = {"num_pages": 60, "max_seq_len_override": 256, "device": "cpu"}
    folder, said = str(folder_of(LATENTS[1])), list[str]()
    for speculative in (None, "mtp"):
        with caplog.at_level(logging.INFO, "minisgl"):
            config = EngineConfig(model=folder, load_format="dummy", **options)
            config = dataclasses.replace(config, speculative=speculative)
            async with await AsyncEngine.start(config):
                said.append(caplog.text)
        caplog.clear()
    assert ["layers that draft tokens, left out: 1" in text for text in said] == [True, False]
    assert ["tokens are drafted by mtp" in text for text in said] == [False, True]
