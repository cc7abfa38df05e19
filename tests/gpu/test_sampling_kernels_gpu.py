"""The sampling kernels on the device: real vocabularies, half precision, captured graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.sampling_cases import ANY_FULL, ANY_PLAIN, FULL, MIXED, PLAIN, Batch, random_logits

from minisgl.request import SamplingParams
from minisgl.runner.sampled_rows import SampledRows

pytestmark = pytest.mark.gpu

VOCABS = (151_936, 128_256)


def device_logits(rows: int, vocab_size: int, **options: object) -> torch.Tensor:
    return random_logits(rows, vocab_size, device="cuda", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("kind", PLAIN)
def test_sampled_tokens_equal_those_of_the_reference(
    kind: str, vocab_size: int, dtype: torch.dtype
) -> None:
    differed = compared = 0
    for seed, scale in enumerate((0.3, 2.0, 5.0)):  # nearly uniform to peaked
        logits = device_logits(24, vocab_size, seed=seed, scale=scale, dtype=dtype)
        batch = Batch.of(PLAIN[kind], 24, logits)
        differed += batch.check(batch.run())
        compared += 24
    assert differed <= compared / 100


@pytest.mark.parametrize("vocab_size", [*VOCABS, 50_257])
def test_a_row_samples_the_same_token_alone_and_in_any_batch(vocab_size: int) -> None:
    logits = device_logits(256, vocab_size, dtype=torch.bfloat16, scale=1.0)
    batch = Batch.of(MIXED, 256, logits, num_slots=258)
    tokens = batch.run()
    for row in range(0, 256, 5):
        assert batch.run(rows=[row]) == tokens[row]
    for count in (2, 8, 31, 100):
        assert torch.equal(batch.run(rows=range(count)), tokens[:count])
    assert batch.check(tokens) <= 2


def test_the_noise_equals_the_torch_reference_bitwise() -> None:
    """Nothing is random but the noise: over equal logits the token tells its exact order, so one
    differing bit in a near-tie would show."""
    logits = torch.zeros(256, 151_936, device="cuda", dtype=torch.bfloat16)
    batch = Batch.of(PLAIN["temperature"], 256, logits, num_slots=258)
    assert torch.equal(batch.run(), batch.perturbed().argmax(dim=-1))


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_rejected_draws_and_deep_cutoffs_sample_the_reference_tokens(scale: float) -> None:
    """Draws that are refused, also several times, and cuts that lie deep among the tokens."""
    logits = device_logits(256, 151_936, dtype=torch.bfloat16, scale=scale)
    params = [SamplingParams(temperature=0.8, top_p=p) for p in (0.9, 0.5, 0.2, 0.01)]
    params += [SamplingParams(top_k=k, top_p=p) for k in (65, 1000, 50_000) for p in (0.9, 1.0)]
    params += [SamplingParams(min_p=0.5), SamplingParams(top_p=0.4, min_p=0.3)]
    batch = Batch.of(params, 256, logits, num_slots=258)
    tokens = batch.run()
    assert batch.check(tokens) <= 2
    assert torch.equal(batch.run(rows=range(0, 256, 17)), tokens[::17])


@pytest.mark.parametrize("rows", [1, 3, 64, 256, 272, 400])
@pytest.mark.parametrize("full", [False, True])
def test_a_captured_sampler_uses_the_current_parameter_tables(rows: int, full: bool) -> None:
    vocab_size = 151_936
    logits = device_logits(rows, vocab_size, dtype=torch.bfloat16)
    kinds = [FULL if full else PLAIN["greedy"], MIXED, PLAIN["all"], FULL if full else MIXED[::-1]]
    batch = Batch.of(kinds[0], rows, logits)
    if full:
        batch.sampler.tables.allocate_history()
    features = ANY_FULL if full else ANY_PLAIN
    batch.sample(features)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = batch.sample(features)

    def replay() -> SampledRows:
        graph.replay()
        return sampled

    for turn, params in enumerate(kinds):
        Batch.join(batch.sampler, params, batch.slots.tolist())
        logits.copy_(device_logits(rows, vocab_size, seed=turn + 10, dtype=torch.bfloat16))
        for _ in range(2):
            batch.output_index.add_(1)
            differed = batch.check_full(replay) if full else batch.check(replay().token_ids)
            assert differed <= max(1, rows // 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_full_variant_tokens_and_logprobs_equal_the_reference(
    vocab_size: int, dtype: torch.dtype
) -> None:
    batch = Batch.of(FULL, 48, device_logits(48, vocab_size, dtype=dtype))
    assert batch.check_full(lambda: batch.sample(ANY_FULL)) <= 1
