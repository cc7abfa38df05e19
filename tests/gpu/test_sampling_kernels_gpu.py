"""The sampling kernels on the device: real vocabularies, half precision, captured graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sampling_cases import FULL, MIXED, PLAIN, Batch, random_logits

from minisgl.kernels.triton_sampling import SampleWorkspace, sample, sample_full
from minisgl.runner.sampler import _History

pytestmark = pytest.mark.gpu

VOCABS = (151_936, 128_256)


def device_logits(rows: int, vocab_size: int, **options: object) -> torch.Tensor:
    return random_logits(rows, vocab_size, device="cuda", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("kind", PLAIN)
def test_tokens_are_those_of_the_reference(kind: str, vocab_size: int, dtype: torch.dtype) -> None:
    differed = compared = 0
    for seed, scale in enumerate((0.3, 2.0, 5.0)):  # nearly uniform to peaked
        logits = device_logits(24, vocab_size, seed=seed, scale=scale, dtype=dtype)
        batch = Batch.of(PLAIN[kind], 24, logits)
        differed += batch.check(batch.run())
        compared += 24
    assert differed <= compared / 100


@pytest.mark.parametrize("vocab_size", [*VOCABS, 50_257])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size: int) -> None:
    logits = device_logits(256, vocab_size, dtype=torch.bfloat16, scale=1.0)
    batch = Batch.of(MIXED, 256, logits, num_slots=258)
    tokens = batch.run()
    for row in range(0, 256, 5):
        assert batch.run(rows=[row]) == tokens[row]
    for count in (2, 8, 31, 100):
        assert torch.equal(batch.run(rows=range(count)), tokens[:count])
    assert batch.check(tokens) <= 2


def test_the_noise_is_torchs_bit_for_bit() -> None:
    """Nothing is random but the noise: over equal logits the token tells its exact order, so one
    differing bit in a near-tie would show."""
    logits = torch.zeros(256, 151_936, device="cuda", dtype=torch.bfloat16)
    batch = Batch.of(PLAIN["temperature"], 256, logits, num_slots=258)
    assert torch.equal(batch.run(), batch.perturbed().argmax(dim=-1))


@pytest.mark.parametrize("rows", [1, 3, 64, 256])
@pytest.mark.parametrize("full", [False, True])
def test_a_captured_graph_follows_the_tables(rows: int, full: bool) -> None:
    vocab_size = 151_936
    logits = device_logits(rows, vocab_size, dtype=torch.bfloat16)
    kinds = [FULL if full else PLAIN["greedy"], MIXED, PLAIN["all"], FULL if full else MIXED[::-1]]
    batch = Batch.of(kinds[0], rows, logits)
    space = SampleWorkspace(rows, vocab_size, logits.device, full=full)
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    tables = batch.tables()
    draw = sample_full if full else sample
    args = (logits, batch.slots, batch.output_index, tables, space, tokens)
    draw(*args)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw(*args)
    history = batch.sampler._history
    assert isinstance(history, _History) and tables.num_logprobs is not None
    for turn, params in enumerate(kinds):
        Batch.join(batch.sampler, params, batch.slots.tolist(), vocab_size)
        tables.num_logprobs.copy_(batch.tables().num_logprobs)
        logits.copy_(device_logits(rows, vocab_size, seed=turn + 10, dtype=torch.bfloat16))
        for _ in range(2):
            batch.output_index.add_(1)
            before = history.output_counts.clone()
            graph.replay()
            after = history.output_counts.clone()
            history.output_counts.copy_(before)
            assert batch.check(tokens) <= max(1, rows // 100)
            if full:
                batch.check_scores(space, tokens)
                history.count(batch.slots, tokens)
                for slot in batch.slots.tolist():
                    if batch.sampler._needs[slot].penalties:
                        assert torch.equal(after[slot], history.output_counts[slot])
            assert not space.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_the_full_variant(vocab_size: int, dtype: torch.dtype) -> None:
    logits = device_logits(48, vocab_size, dtype=dtype)
    batch = Batch.of(FULL, 48, logits)
    space = SampleWorkspace(48, vocab_size, logits.device, full=True)
    tokens = torch.empty(48, dtype=torch.int64, device="cuda")
    history = batch.sampler._history
    assert history is not None
    before = history.output_counts.clone()
    sample_full(logits, batch.slots, batch.output_index, batch.tables(), space, tokens)
    history.output_counts.copy_(before)
    assert batch.check(tokens) <= 1
    batch.check_scores(space, tokens)
