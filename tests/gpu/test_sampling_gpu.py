"""The same tokens from the same logits on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from minisgl.kernels.philox import uniform
from minisgl.kernels.sampling import margin, top_logprobs
from minisgl.request import SamplingParams
from minisgl.runner.sampler import SampledRows, Sampler
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


def sample(sampler: Sampler, logits: torch.Tensor, step: int) -> SampledRows:
    slots = range(ROWS - 1, -1, -1)
    on_device = torch.arange(ROWS - 1, -1, -1, device=logits.device)
    index = torch.full((ROWS,), step, device=logits.device)
    return sampler.sample(logits, on_device, slots, index)


def margins(sampler: Sampler, logits: torch.Tensor, step: int) -> torch.Tensor:
    index = torch.full((ROWS,), step)
    slots = range(ROWS - 1, -1, -1)
    return margin(sampler.perturbed(logits, torch.tensor(list(slots)), slots, index))


def test_uniform_is_the_same_to_the_bit():
    seeds, index = torch.arange(ROWS) * 2**58 - 3, torch.arange(ROWS) * 1000
    assert torch.equal(
        uniform(seeds.cuda(), index.cuda(), VOCAB).cpu(), uniform(seeds, index, VOCAB)
    )


def test_tokens_are_the_same():
    samplers = Sampler(ROWS, VOCAB, CPU), Sampler(ROWS, VOCAB, GPU)
    for sampler in samplers:
        sampler.join(varied_joins())
    agreed = torch.ones(ROWS, dtype=torch.bool)  # rows whose histories are still the same
    for step in range(STEPS):
        logits = random_logits(step)
        gaps = margins(samplers[0], logits, step)
        on_cpu, on_gpu = (sample(s, logits.to(s.device), step).token_ids.cpu() for s in samplers)
        differ = agreed & (on_cpu != on_gpu)
        assert (gaps[differ] < NOISE).all()
        agreed &= ~differ
    assert agreed.float().mean() > 0.95


def test_a_row_on_the_gpu_is_the_same_alone_and_batched():
    sampler, logits = Sampler(ROWS, VOCAB, GPU), random_logits(0).cuda()
    sampler.join(varied_joins())
    slots = torch.arange(ROWS - 1, -1, -1, device=GPU)
    index = torch.zeros(ROWS, dtype=torch.int64, device=GPU)
    together = sampler.perturbed(logits, slots, slots.tolist(), index)
    for row, slot in enumerate(slots.tolist()):
        alone = sampler.perturbed(logits[row, None], slots[row, None], [slot], index[row, None])
        assert torch.equal(alone[0], together[row])


def test_scores_are_the_same():
    logits = random_logits(0)
    tokens = logits.argmax(-1)
    wanted, got = top_logprobs(logits, tokens, 20), top_logprobs(logits.cuda(), tokens.cuda(), 20)
    assert torch.equal(got.top_ids.cpu(), wanted.top_ids)
    torch.testing.assert_close(got.top_logprobs.cpu(), wanted.top_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.logprob.cpu(), wanted.logprob, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_device_is_never_waited_for():
    sampler, logits = Sampler(ROWS, VOCAB, GPU), torch.zeros(ROWS, VOCAB, device=GPU)
    with no_waiting():
        for step in range(3):
            sampler.join(varied_joins())
            sample(sampler, logits, step)
