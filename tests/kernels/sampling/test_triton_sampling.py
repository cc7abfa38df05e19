"""The Triton sampling kernels in Triton's interpreter, against the torch reference."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="Triton is not installed: scripts/tools/try_interpreter.sh")

import triton
import triton.language as tl
from support.sampling_cases import (
    ANY_FULL,
    ANY_PLAIN,
    FULL,
    MIXED,
    PLAIN,
    Batch,
    allowed_tokens,
    random_logits,
)

from minisgl.kernels.sampling import device_order, filters, launch
from minisgl.kernels.sampling import noise as token_noise
from minisgl.kernels.sampling import rows as row_tables
from minisgl.kernels.sampling.philox import philox4x32, uniform
from minisgl.kernels.tuning import H200
from minisgl.request import MAX_LOGIT_BIAS, SamplingParams
from minisgl.runner import sampler as sampler_module
from minisgl.runner.sampling_features import Scoring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = (5, 97, 1000, 2048, 5000)


@triton.jit
def _noise_kernel(words, gumbel, most, rank, seed, index, first, QUADS: tl.constexpr):  # noqa: N803
    quads = first + tl.arange(0, QUADS)
    drawn = token_noise.words_of_quads(seed, index, quads)
    ids = row_tables.ids_of(quads)
    places = ids - first * 4
    tl.store(words + places, drawn.to(tl.int64))
    noise = token_noise.gumbel(drawn)
    tl.store(gumbel + places, noise)
    tl.store(most + places, token_noise.most_gumbel(drawn))
    ranks = device_order.order_key(noise, places)
    found = device_order.id_of(ranks)
    tl.store(rank + places, tl.where(device_order.value_of(ranks) == noise, found, -1))


@triton.jit
def _weight_kernel(gaps, weights, SIZE: tl.constexpr):  # noqa: N803
    place = tl.arange(0, SIZE)
    tl.store(weights + place, filters.weight_of(tl.load(gaps + place)))


@triton.jit
def _most_kernel(words, gumbel, most, SIZE: tl.constexpr):  # noqa: N803
    place = tl.arange(0, SIZE)
    drawn = tl.load(words + place).to(tl.uint32)
    tl.store(gumbel + place, token_noise.gumbel(drawn))
    tl.store(most + place, token_noise.most_gumbel(drawn))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize(("index", "first"), [(0, 0), (7, 128), (2**31 - 1, 37_000)])
def test_random_words_and_gumbel_noise_equal_the_reference(
    seed: int, index: int, first: int
) -> None:
    count = 256
    words = torch.empty(count, dtype=torch.int64, device=DEVICE)
    gumbel, most = torch.empty(2, count, device=DEVICE)
    ids = torch.empty(count, dtype=torch.int32, device=DEVICE)
    _noise_kernel[(1,)](words, gumbel, most, ids, seed, index, first, QUADS=count // 4)
    quads, zero = first + torch.arange(count // 4), torch.zeros(1, dtype=torch.int64)
    key = (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([(seed >> 32) & 0xFFFFFFFF]))
    wanted = philox4x32((quads, torch.tensor([index]), zero, zero), key)
    assert torch.equal(words.cpu(), torch.stack(wanted, dim=-1).flatten())
    numbers = uniform(torch.tensor([seed]), torch.tensor([index]), (first + count // 4) * 4)
    expected = -(-numbers[0, first * 4 :].log()).log()
    torch.testing.assert_close(gumbel.cpu(), expected, atol=2e-6, rtol=1e-6)
    assert (most >= gumbel).all()
    assert torch.equal(ids.cpu(), torch.arange(count, dtype=torch.int32))


def test_the_noise_bound_holds_and_is_tight_for_the_largest_words() -> None:
    size = 4096
    for top in (0, 2**32 - size * 512, 2**32 - 1 - size, 2**31):
        step = 512 if top in (0, 2**32 - size * 512) else 1
        words = top + torch.arange(size, device=DEVICE) * step
        gumbel, most = torch.empty(2, size, device=DEVICE)
        _most_kernel[(1,)](words, gumbel, most, SIZE=size)
        assert (most >= gumbel + 5e-5).all()
        if top == 2**32 - size * 512:
            assert (most[:-64] - gumbel[:-64]).max() < 0.08


def test_filter_weights_equal_the_reference() -> None:
    gaps = torch.cat([-torch.rand(4092) * 29, torch.tensor([0.0, -0.0, -torch.inf, -1e30])])
    weights = torch.empty(4096, dtype=torch.int64, device=DEVICE)
    _weight_kernel[(1,)](gaps.to(DEVICE), weights, SIZE=4096)
    wanted = (gaps.double().exp() * 2.0**40).long()
    assert weights[-4:].tolist() == [2**40, 2**40, 0, 0]
    close = (weights.cpu() - wanted).abs() <= wanted * 2.0**-22 + 1
    assert close.all()


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("kind", PLAIN)
def test_sampled_tokens_equal_those_of_the_reference(kind: str, vocab_size: int) -> None:
    logits = random_logits(9, vocab_size, seed=vocab_size).to(DEVICE)
    batch = Batch.of(PLAIN[kind], 9, logits)
    assert batch.check(batch.run()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_as_they_are(dtype: torch.dtype) -> None:
    batch = Batch.of(MIXED, 17, random_logits(17, 1000, dtype=dtype).to(DEVICE))
    assert batch.check(batch.run()) == 0


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 5000), (3, 97), (17, 2100)])
def test_a_row_samples_the_same_token_alone_and_in_any_batch(rows: int, vocab_size: int) -> None:
    batch = Batch.of(MIXED, rows, random_logits(rows, vocab_size, seed=3, scale=1.0).to(DEVICE))
    tokens = batch.run()
    assert batch.check(tokens) == 0
    for row in range(rows):
        assert batch.run(rows=[row]) == tokens[row]
    order = list(range(rows))[::-1]
    assert torch.equal(batch.run(rows=order), tokens[order])


def test_the_part_size_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have one tile or all of a row."""
    batch = Batch.of(MIXED, 6, random_logits(6, 9000, seed=5).to(DEVICE))
    tokens = batch.run()
    for programs in (6, 12):
        tuning = replace(H200, sampling_programs=programs)
        monkeypatch.setattr(launch, "tuning_of", lambda device, tuning=tuning: tuning)
        assert torch.equal(batch.run(), tokens)


@pytest.mark.parametrize("value", [0.0, -3.5, 50.0])
def test_equal_logits_are_ordered_by_token_id(value: float) -> None:
    logits = torch.full((len(MIXED), 1000), value, device=DEVICE)
    batch = Batch.of(MIXED, len(MIXED), logits)
    assert batch.check(batch.run()) == 0
    greedy = Batch.of([SamplingParams(temperature=0)], 2, logits[:2])
    assert greedy.run().tolist() == [0, 0]


def test_a_cutoff_among_equal_logits_keeps_the_lower_ids() -> None:
    """The k-th token, and the one that reaches top_p, have hundreds of equals."""
    logits = torch.zeros(12, 4500, device=DEVICE)
    logits[:, 1234::1500] = 2.0
    params = [
        SamplingParams(top_k=5),
        SamplingParams(top_k=66),
        SamplingParams(top_k=5, top_p=0.8),
        SamplingParams(top_k=80, top_p=0.97),
        SamplingParams(top_p=0.02),
        SamplingParams(top_p=0.9),
    ]
    batch = Batch.of(params, 12, logits)
    assert batch.check(batch.run()) == 0


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_top_k_in_the_thousands_samples_the_reference_tokens(scale: float) -> None:
    """More than there are segments, and more than can be gathered; some or all have equals."""
    logits = random_logits(15, 9000, seed=21, scale=scale).to(DEVICE)
    params = [
        SamplingParams(top_k=100),
        SamplingParams(top_k=141),  # as many as there are segments
        SamplingParams(top_k=142, top_p=0.7),
        SamplingParams(top_k=3000),
        SamplingParams(top_k=7000, top_p=0.97),
        SamplingParams(top_k=8000),
        SamplingParams(top_k=8990),
    ]
    batch = Batch.of(params, 15, logits)
    assert batch.check(batch.run()) == 0


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.5])
def test_rejected_draws_are_repeated(scale: float) -> None:
    """Over flat logits a small top_p refuses often, and what is left lies in every segment."""
    logits = random_logits(30, 9000, seed=22, scale=scale).to(DEVICE)
    params = [SamplingParams(top_p=p) for p in (0.5, 0.2, 0.04, 0.001)]
    params += [SamplingParams(min_p=0.6), SamplingParams(top_p=0.3, min_p=0.5)]
    batch = Batch.of(params, 30, logits)
    assert batch.check(batch.run()) == 0


def test_with_one_token_unmasked_it_is_sampled() -> None:
    logits = torch.full((len(MIXED), 300), -torch.inf, device=DEVICE)
    logits[:, 250] = -5.0
    assert Batch.of(MIXED, len(MIXED), logits).run().tolist() == [250] * len(MIXED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_row_without_candidates_gives_an_id_within_the_vocabulary(value: float) -> None:
    logits = torch.full((len(MIXED), 300), value, device=DEVICE)
    tokens = Batch.of(MIXED, len(MIXED), logits).run()
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_samples_cover_every_kept_token() -> None:
    """The noise belongs to the seed and index: distinct ones draw distinct tokens."""
    logits = torch.zeros(32, 128, device=DEVICE)
    batch = Batch.of([SamplingParams(top_k=4)], 32, logits)
    tokens = batch.run()
    assert batch.check(tokens) == 0
    assert set(tokens.tolist()) == set(range(4))


def masked_logits(rows: int, vocab_size: int, **options: Any) -> torch.Tensor:
    """Finite, so that each mask leaves a candidate."""
    return random_logits(rows, vocab_size, **options).clamp(min=-60.0).to(DEVICE)


class TestMasks:
    @pytest.mark.parametrize("vocab_size", [97, 5000])
    @pytest.mark.parametrize("kind", PLAIN)
    def test_tokens_equal_those_of_the_reference(self, kind: str, vocab_size: int) -> None:
        allowed = allowed_tokens(12, vocab_size)
        logits = masked_logits(12, vocab_size, seed=vocab_size)
        batch = Batch.of(PLAIN[kind], 12, logits, allowed=allowed)
        tokens = batch.run()
        assert batch.check(tokens) == 0
        assert all(int(tokens[row]) in ids for row, ids in allowed.items())

    def test_rows_without_a_mask_sample_what_they_sample_without_any(self) -> None:
        logits = masked_logits(17, 5000, seed=31)
        alone, batch = (
            Batch.of(MIXED, 17, logits, allowed=allowed)
            for allowed in (None, allowed_tokens(17, 5000))
        )
        assert torch.equal(batch.run()[::3], alone.run()[::3])

    def test_the_full_variant_obeys_masks_and_reports_raw_logprobs(self) -> None:
        allowed = allowed_tokens(12, 1000)
        batch = Batch.of(FULL, 12, masked_logits(12, 1000, seed=32), allowed=allowed)
        features = ANY_FULL._replace(masked=True)
        for step in range(3):
            assert batch.check_full(lambda: batch.sample(features)) == 0, step
            batch.output_index.add_(1)

    def test_a_part_of_the_vocabulary_reads_its_part_of_the_masks(self) -> None:
        logits = masked_logits(9, 1001, seed=33)
        params = [SamplingParams(temperature=0), SamplingParams()]
        batch = Batch.of(params, 9, logits, allowed=allowed_tokens(9, 1001))
        tokens = batch.run_parts([0, 332, 700, 1001])
        assert batch.check(tokens) == 0
        assert torch.equal(tokens, batch.run())

    def test_a_mask_of_any_kind_gives_a_row_the_same_token_in_any_batch(self) -> None:
        logits = masked_logits(12, 2100, seed=34, scale=1.0)
        batch = Batch.of(MIXED, 12, logits, allowed=allowed_tokens(12, 2100))
        tokens = batch.run()
        for row in range(12):
            assert batch.run(rows=[row]) == tokens[row]


SIGMA = [
    SamplingParams(temperature=t, top_n_sigma=n, top_p=p, top_k=k, min_p=m)
    for t, n, p, k, m in [
        (1.0, 1.5, 1.0, 0, 0.0),
        (2.0, 0.3, 1.0, 0, 0.0),
        (0.7, 3.0, 0.8, 0, 0.0),
        (1.9, 2.2, 0.3, 0, 0.0),
        (1.5, 2.0, 1.0, 40, 0.0),
        (1.6, 2.5, 0.6, 90, 0.0),
        (1.3, 4.0, 0.9, 0, 0.02),
        (1.0, 100.0, 1.0, 0, 0.0),
        (1.0, -1.0, 1.0, 0, 0.0),
    ]
]


class TestTopNSigma:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocab_size", VOCABS)
    def test_tokens_equal_the_reference(self, vocab_size: int, dtype: torch.dtype) -> None:
        logits = random_logits(18, vocab_size, seed=40, dtype=dtype).to(DEVICE)
        batch = Batch.of(SIGMA, 18, logits)
        assert batch.check(batch.run(full=True)) == 0
        batch.output_index.add_(1)
        tokens = batch.run(full=True)
        assert batch.check(tokens) == 0
        for row in range(9):
            assert batch.run(full=True, rows=[row]) == tokens[row]

    @pytest.mark.parametrize("vocab_size", [1000, 5000])
    def test_a_masked_token_does_not_count(self, vocab_size: int) -> None:
        allowed = allowed_tokens(18, vocab_size)
        batch = Batch.of(SIGMA, 18, masked_logits(18, vocab_size, seed=41), allowed=allowed)
        tokens = batch.run(full=True)
        assert batch.check(tokens) == 0
        assert all(int(tokens[row]) in ids for row, ids in allowed.items())

    def test_a_token_outside_of_the_standard_deviations_is_never_drawn(self) -> None:
        logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).repeat(200, 1).to(DEVICE)
        batch = Batch.of([SamplingParams(temperature=2, top_n_sigma=1)], 200, logits)
        assert {*batch.run(full=True).tolist()} == {0, 1}


class TestFull:
    @pytest.mark.parametrize("vocab_size", VOCABS)
    def test_tokens_history_and_logprobs_equal_the_reference(self, vocab_size: int) -> None:
        batch = Batch.of(FULL, 12, random_logits(12, vocab_size, seed=8).to(DEVICE))
        for step in range(3):
            assert batch.check_full(lambda: batch.sample(ANY_FULL)) == 0, step
            batch.output_index.add_(1)

    @pytest.mark.parametrize("vocab_size", [97, 9000])
    def test_up_to_128_alternatives_equal_the_reference(self, vocab_size: int) -> None:
        """Of 9,000 ids, 128 alternatives lie in more segments than a list has."""
        params = [SamplingParams(temperature=2, logprobs=n) for n in (128, 65, 64, 20, 0)]
        logits = random_logits(5, vocab_size, seed=12, scale=0.5).to(DEVICE)
        logits[3::4] = logits[3::4].round()
        batch = Batch.of(params, 5, logits, scoring=Scoring(most=128))
        sampled = batch.sample(ANY_FULL)
        scores = sampled.scores
        assert scores is not None and scores.top_ids.shape[1] == min(128, vocab_size)
        assert scores.rank.max() > 20
        batch.check_scores(scores, sampled.token_ids)

    @pytest.mark.parametrize("kind", [*PLAIN, "sigma", "full"])
    def test_processed_logprobs_equal_the_reference(self, kind: str) -> None:
        """4,200 ids are two tiles, and more segments than a list has."""
        params = {**PLAIN, "sigma": SIGMA, "full": FULL}[kind]
        params = [replace(each, logprobs=(place * 5) % 21) for place, each in enumerate(params)]
        logits = random_logits(len(params), 4200, seed=13, scale=1.5).to(DEVICE)
        batch = Batch.of(params, len(params), logits, scoring=Scoring(processed=True))
        batch.sampler.tables.allocate_history()
        assert batch.check_full(lambda: batch.sample(ANY_FULL)) == 0

    def test_processed_logprobs_are_of_the_tokens_that_a_mask_allows(self) -> None:
        allowed = allowed_tokens(12, 1000)
        params = [replace(each, logprobs=7) for each in FULL]
        logits, scoring = masked_logits(12, 1000, seed=32), Scoring(processed=True)
        batch = Batch.of(params, 12, logits, allowed=allowed, scoring=scoring)
        features = ANY_FULL._replace(masked=True)
        assert batch.check_full(lambda: batch.sample(features)) == 0

    def test_processed_logprobs_of_a_row_are_the_same_alone_and_in_any_batch(self) -> None:
        params = [replace(each, logprobs=5) for each in MIXED]
        logits = random_logits(6, 2100, seed=14, scale=1.0).to(DEVICE)
        batch = Batch.of(params, 6, logits, scoring=Scoring(processed=True))
        together = batch.sample(ANY_FULL).scores
        assert together is not None
        for row in (0, 4):
            one = replace(
                batch,
                logits=logits[[row]],
                slots=batch.slots[[row]],
                output_index=batch.output_index[[row]],
            )
            alone = one.sample(ANY_FULL).scores
            assert alone is not None and alone.logprob[0] == together.logprob[row]

    def test_the_full_variant_samples_plain_rows_like_the_plain_variant(self) -> None:
        """No row has penalties, so there is no history."""
        batch = Batch.of(MIXED, 17, random_logits(17, 700, seed=9).to(DEVICE))
        assert batch.sampler.tables.prompt_seen is None
        assert torch.equal(batch.run(full=True), batch.run())

    def test_edits_and_logprobs_need_no_history(self) -> None:
        params = [SamplingParams(logit_bias={7: 3.0}, min_tokens=2), SamplingParams(logprobs=3)]
        batch = Batch.of(params, 4, random_logits(4, 300, seed=11).to(DEVICE))
        assert batch.sampler.tables.prompt_seen is None
        sampled = batch.sample(ANY_FULL)
        assert batch.check(sampled.token_ids) == 0
        assert sampled.scores is not None
        batch.check_scores(sampled.scores, sampled.token_ids)

    def test_logprobs_are_the_same_alone_and_batched(self) -> None:
        batch = Batch.of(FULL, 6, random_logits(6, 5000, seed=4).to(DEVICE))
        scores = batch.sample(ANY_FULL).scores
        assert scores is not None
        for row in (0, 4, 5):
            one = [t[row, None] for t in (batch.logits, batch.slots, batch.output_index)]
            single = batch.sampler.sample(*one, ANY_FULL).scores
            assert single is not None
            assert torch.equal(single.top_logprobs[0, :1], scores.top_logprobs[row, :1])

    def test_a_request_with_the_most_biases_and_masks_samples_the_reference_tokens(self) -> None:
        vocab_size = 2 * MAX_LOGIT_BIAS
        bias = dict.fromkeys(range(MAX_LOGIT_BIAS), -50.0)
        params = SamplingParams(temperature=0, logit_bias=bias, min_tokens=2)
        logits = torch.zeros(4, vocab_size, device=DEVICE)
        logits[:, [1, 3]] = 90.0  # stop tokens, biased as well
        batch = Batch.of([params], 4, logits)
        tokens = batch.run(full=True)  # of output indices 0 to 3
        assert tokens.tolist() == [MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, 1, 1]
        assert batch.check(tokens) == 0


class TestSampler:
    """The sampler's use of the kernels."""

    @pytest.mark.parametrize("full", [False, True])
    def test_more_rows_than_fit_the_workspace_are_scored_in_blocks(
        self, full: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params, logits = FULL if full else MIXED, random_logits(11, 300, seed=6).to(DEVICE)
        whole = Batch.of(params, 11, logits)
        monkeypatch.setattr(sampler_module, "BLOCK_ROWS", 4)
        blocks = Batch.of(params, 11, logits)
        assert blocks.sampler._triton._workspace.num_rows == 4
        features = ANY_FULL if full else ANY_PLAIN
        sampled, expected = blocks.sample(features), whole.sample(features)
        assert torch.equal(sampled.token_ids, expected.token_ids)
        if full:
            assert torch.equal(blocks.history(), whole.history())
            blocks.check_scores(sampled.scores, sampled.token_ids)

    def test_padded_rows_are_greedy_wherever_they_are_in_the_batch(self) -> None:
        logits = random_logits(9, 200, seed=5).to(DEVICE)
        batch = Batch.of(FULL, 9, logits)
        before = batch.history().clone()
        expected = batch.run(full=True)
        batch.history().copy_(before)
        slots, padded = batch.slots.to(torch.int32), [1, 4, 8]  # either type will do
        slots[padded] = 11  # there are 11 slots
        expected[padded] = logits[padded].argmax(-1)
        tokens = batch.sampler.sample(logits, slots, batch.output_index, ANY_FULL).token_ids
        assert torch.equal(tokens, expected)
        assert not batch.history()[11].any()

    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sampling_does_not_modify_the_raw_logits(self, full: bool, dtype: torch.dtype) -> None:
        logits = random_logits(18, 500, seed=12, dtype=dtype).to(DEVICE)
        batch = Batch.of(FULL if full else MIXED, 18, logits)
        features, before = batch.sampler.features(range(18)), logits.clone()
        args = (logits, batch.slots, batch.output_index, features)
        perturbed = batch.sampler.perturbed(*args)
        sampled = batch.sampler.sample(*args)
        assert torch.equal(sampled.token_ids, perturbed.argmax(-1))
        assert torch.equal(logits, before)
        if full:  # the logprobs are those of the raw logits
            batch.check_scores(sampled.scores, sampled.token_ids)

    def test_a_workspace_serves_smaller_batches_and_any_order_of_calls(self) -> None:
        batch = Batch.of(MIXED, 9, random_logits(9, 2500, seed=2).to(DEVICE))
        tokens = batch.run()
        for rows in (9, 2, 9, 1):
            args = (batch.logits, batch.slots, batch.output_index)
            part = batch.sampler.sample(*(tensor[:rows] for tensor in args), ANY_PLAIN)
            assert torch.equal(part.token_ids, tokens[:rows])
