"""Masks on the device: kernels at a real vocabulary, and whole runs against those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.masked_rows import outputs, rows
from support.parity import FEW_PAGES
from support.sampling_cases import (
    ANY_FULL,
    ANY_PLAIN,
    FULL,
    MIXED,
    PLAIN,
    Batch,
    allowed_tokens,
    packed_masks,
    random_logits,
)

from minisgl.request import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB = 151_936
NUM_ROWS = 24


def device_logits(rows: int, **options: Any) -> torch.Tensor:
    """Finite, so that each mask leaves a candidate."""
    return random_logits(rows, VOCAB, device="cuda", **options).clamp(min=-60.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", PLAIN)
def test_masked_tokens_equal_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    allowed = allowed_tokens(NUM_ROWS, VOCAB)
    differed = 0
    for seed, scale in enumerate((0.3, 2.0, 5.0)):
        logits = device_logits(NUM_ROWS, seed=seed, scale=scale, dtype=dtype)
        batch = Batch.of(PLAIN[kind], NUM_ROWS, logits, allowed=allowed)
        tokens = batch.run()
        differed += batch.check(tokens)
        assert all(int(tokens[row]) in ids for row, ids in allowed.items())
    assert differed <= 1


def test_rows_without_a_mask_sample_what_they_sample_without_any() -> None:
    logits = device_logits(256, dtype=torch.bfloat16, scale=1.0)
    allowed = allowed_tokens(30, VOCAB)
    alone = Batch.of(MIXED, 256, logits, num_slots=258)
    batch = Batch.of(MIXED, 256, logits, num_slots=258, allowed=allowed)
    free = [row for row in range(256) if row not in allowed]
    assert torch.equal(batch.run()[free], alone.run()[free])


def test_the_full_variant_obeys_masks_and_reports_raw_logprobs() -> None:
    allowed = allowed_tokens(NUM_ROWS, VOCAB)
    batch = Batch.of(FULL, NUM_ROWS, device_logits(NUM_ROWS, seed=3), allowed=allowed)
    features = ANY_FULL._replace(masked=True)
    batch.sample(features)  # allocates
    assert batch.check_full(lambda: batch.sample(features)) <= 1


def test_a_part_of_the_vocabulary_reads_its_part_of_the_masks() -> None:
    params = [SamplingParams(temperature=0), SamplingParams()]
    allowed = allowed_tokens(NUM_ROWS, VOCAB)
    batch = Batch.of(params, NUM_ROWS, device_logits(NUM_ROWS, seed=4), allowed=allowed)
    assert torch.equal(batch.run_parts([0, VOCAB // 2, VOCAB]), batch.run())


def test_a_captured_sampler_reads_the_masks_of_each_replay() -> None:
    allowed = allowed_tokens(NUM_ROWS, VOCAB)
    batch = Batch.of(MIXED, NUM_ROWS, device_logits(NUM_ROWS, seed=5), allowed=allowed)
    features = ANY_PLAIN._replace(masked=True)
    batch.sample(features)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = batch.sample(features).token_ids
    masked = tuple(batch.slots[list(allowed)].tolist())
    for shift in (1, 2):
        moved = [[(id + shift * 1000) % VOCAB for id in ids] for ids in allowed.values()]
        batch.sampler.mask(masked, packed_masks(moved, VOCAB).cuda())
        graph.replay()
        assert batch.check(sampled) <= 1


ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
VARIANTS: list[dict[str, Any]] = [
    {"cuda_graph_max_bs": 0},
    {"cuda_graph_max_bs": 8},  # larger batches run eagerly
    {"cuda_graph_max_bs": 64},
    {"cuda_graph_max_bs": 64, "overlap": False},
    {"cuda_graph_max_bs": 64, "max_prefill_length": 16},
    {"cuda_graph_max_bs": 8, **FEW_PAGES},
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return outputs(rows(64))


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ",".join(map(str, options)))
def test_mixed_rows_get_the_tokens_that_the_cpu_gives_them(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    assert outputs(rows(64), **ON_GPU, **options) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graph_max_bs", [0, 32])
def test_mixed_rows_of_two_gpus_get_the_tokens_of_the_cpu(
    cuda_graph_max_bs: int, expected: list[list[int]]
) -> None:
    got = outputs(rows(32), tp=2, cuda_graph_max_bs=cuda_graph_max_bs, **ON_GPU)
    assert got == expected[:32]
