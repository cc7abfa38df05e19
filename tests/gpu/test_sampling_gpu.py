"""Sampling by torch and by Triton on a GPU gives the tokens of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Literal

import pytest
import torch

from minisgl.kernels.sampling.listed import list_logprobs
from minisgl.kernels.sampling.philox import uniform
from minisgl.kernels.sampling.reference import TokenScores, margin, top_logprobs
from minisgl.request import SamplingParams
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import SamplingFeatures
from minisgl.scheduler.plan import SlotJoin

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS, VOCAB, STEPS = 64, 32_003, 6
NOISE = 1e-4  # logits over a temperature of 0.3, and logarithms of two libraries


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, torch raises where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_logits(step: int) -> torch.Tensor:
    """Rounded as those of half-precision models are, so that equal logits are common."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(ROWS, VOCAB, generator=generator) * 4).bfloat16().float()


def varied_joins() -> list[SlotJoin]:
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(logprobs=20),
        SamplingParams(temperature=0.3, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=50),
        SamplingParams(top_k=1000, top_p=0.7, min_p=0.001, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=3),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, min_tokens=3),
        SamplingParams(min_p=0.05, logit_bias={7: 9.0, 70: -100.0}),
    ]
    return [
        SlotJoin(
            slot=ROWS - 1 - row,
            params=kinds[row % len(kinds)],
            seed=row * 104_729 - 50,
            stop_token_ids=frozenset({2, 3}),
            prompt_token_ids=range(row, 20 * row + 1),
            output_token_ids=(),
        )
        for row in range(ROWS)
    ]


SLOTS = range(ROWS - 1, -1, -1)


def arguments(
    sampler: Sampler, logits: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingFeatures]:
    slots = torch.arange(ROWS - 1, -1, -1, device=logits.device)
    index = torch.full((ROWS,), step, device=logits.device)
    return logits, slots, index, sampler.features(SLOTS)


def test_uniform_noise_equals_the_cpu_bitwise():
    seeds, index = torch.arange(ROWS) * 2**58 - 3, torch.arange(ROWS) * 1000
    assert torch.equal(
        uniform(seeds.cuda(), index.cuda(), VOCAB).cpu(), uniform(seeds, index, VOCAB)
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sampled_tokens_equal_those_of_the_cpu(backend: Literal["torch", "triton"]):
    samplers = Sampler(ROWS, VOCAB, CPU), Sampler(ROWS, VOCAB, GPU, backend)
    for sampler in samplers:
        sampler.join(varied_joins())
    agreed = torch.ones(ROWS, dtype=torch.bool)  # rows whose histories are still the same
    for step in range(STEPS):
        logits = random_logits(step)
        gaps = margin(samplers[0].perturbed(*arguments(samplers[0], logits, step)))
        here, there = (
            sampler.sample(*arguments(sampler, logits.to(sampler.device), step))
            for sampler in samplers
        )
        differ = agreed & (here.token_ids != there.token_ids.cpu())
        assert (gaps[differ] < NOISE).all()
        agreed &= ~differ
        wanted, tokens = samplers[0].logprobs_wanted(SLOTS), here.token_ids.tolist()
        assert here.scores is not None and there.scores is not None
        listed = [list_logprobs(tokens, on_host(s.scores), wanted) for s in (here, there)]
        for row in agreed.nonzero().flatten().tolist():
            if wanted[row] is not None:
                ours, theirs = listed[0][row], listed[1][row]
                assert theirs.logprob == pytest.approx(ours.logprob, abs=2e-5)
                assert [id for id, _ in theirs.top] == [id for id, _ in ours.top]
    assert agreed.float().mean() > 0.95


def on_host(scores: TokenScores | None) -> TokenScores:
    assert scores is not None
    return TokenScores(*(each.cpu() for each in astuple(scores)))


def test_a_gpu_samples_with_triton_by_default():
    assert Sampler(2, VOCAB, GPU)._triton is not None
    assert Sampler(2, VOCAB, CPU)._triton is None


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_on_the_gpu_is_the_same_alone_and_batched(backend: Literal["torch", "triton"]):
    sampler, logits = Sampler(ROWS, VOCAB, GPU, backend), random_logits(0).cuda()
    sampler.join(varied_joins())
    args = arguments(sampler, logits, 0)
    together = sampler.perturbed(*args)
    tokens = sampler.sample(*args).token_ids
    sampler.join(varied_joins())  # with the history of before
    for row, slot in enumerate(SLOTS):
        alone = (*(tensor[row, None] for tensor in args[:3]), sampler.features([slot]))
        assert torch.equal(sampler.perturbed(*alone)[0], together[row])
        assert sampler.sample(*alone).token_ids[0] == tokens[row]


def test_top_logprobs_match_those_of_the_cpu():
    logits = random_logits(0)
    tokens = logits.argmax(-1)
    wanted, got = top_logprobs(logits, tokens, 20), top_logprobs(logits.cuda(), tokens.cuda(), 20)
    assert torch.equal(got.top_ids.cpu(), wanted.top_ids)
    torch.testing.assert_close(got.top_logprobs.cpu(), wanted.top_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.logprob.cpu(), wanted.logprob, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sampling_never_synchronizes_with_the_device(backend: Literal["torch", "triton"]):
    sampler = Sampler(ROWS, VOCAB, GPU, backend)
    logits = torch.zeros(ROWS, VOCAB, device=GPU)
    sampler.sample(*arguments(sampler, logits, 0))  # compiles
    with no_waiting():
        for step in range(3):
            sampler.join(varied_joins())
            sampler.sample(*arguments(sampler, logits, step))


def test_the_full_variant_is_not_captured_before_it_has_its_memory():
    sampler = Sampler(ROWS, VOCAB, GPU)
    features = SamplingFeatures(penalties=True)
    args = arguments(sampler, torch.zeros(ROWS, VOCAB, device=GPU), 0)[:3]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        args[2].add_(1)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="before this is captured"):
            sampler.sample(*args, features)
        graph.capture_end()
