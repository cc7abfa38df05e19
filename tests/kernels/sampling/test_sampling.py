"""The arithmetic of sampling on tensors alone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from minisgl.kernels.sampling.reference import (
    SamplingRows,
    add_bias,
    deviation,
    margin,
    penalize,
    perturb,
    top_logprobs,
)

INF = math.inf


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Half of the values are rounded, so that equal logits are common."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.where(torch.arange(vocab_size) % 2 == 0, logits.round(), logits)


def rows_of(count: int, temperature: float = 1.0, **filters: float) -> SamplingRows:
    dtypes = {"top_k": torch.int64}
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        seed=torch.arange(count) * 1_000_003 - 7,
        output_index=torch.arange(count) % 5,
        filters={
            name: torch.full((count,), value, dtype=dtypes.get(name, torch.float32))
            for name, value in filters.items()
        },
    )


def kept(logits: list[float], temperature: float = 1.0, **filters: float) -> list[int]:
    """The token ids that the filters leave."""
    perturbed = perturb(torch.tensor([logits]), rows_of(1, temperature, **filters))
    return perturbed[0].isfinite().nonzero().flatten().tolist()


class TestFilters:
    def test_top_k_prefers_the_lower_id_among_equal_logits(self):
        assert kept([1, 3, 2, 3, 3], top_k=2) == [1, 3]
        assert kept([0, 0, 0, 0], top_k=1) == [0]

    def test_top_k_off_or_above_the_vocabulary_size_keeps_every_token(self):
        assert kept([1, 2, 3], top_k=0) == kept([1, 2, 3], top_k=99) == [0, 1, 2]

    def test_top_p_keeps_the_smallest_prefix_that_reaches_it(self):
        logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
        assert kept(logits, top_p=0.49) == [1]
        assert kept(logits, top_p=0.51) == [1, 3]
        assert kept(logits, top_p=0.76) == [1, 2, 3]
        assert kept(logits, top_p=0.95) == [0, 1, 2, 3]

    def test_top_p_reached_exactly_among_equals_keeps_no_further_token(self):
        assert kept([2, 2, 2, 2], top_p=0.5) == [0, 1]
        assert kept([2, 2, 2, 2], top_p=0.51) == [0, 1, 2]

    def test_top_p_0_is_the_likeliest_token_and_1_is_off(self):
        assert kept([1, 4, 4, 2], top_p=0) == [1]
        assert kept([0, -200, -300, -400], top_p=1) == [0, 1, 2, 3]

    def test_min_p_is_relative_to_the_likeliest_after_temperature(self):
        logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
        assert kept(logits, min_p=0.4) == [0, 1]
        assert kept(logits, temperature=2.0, min_p=0.4) == [0, 1, 2]
        assert kept(logits, temperature=0.5, min_p=0.4) == [0]
        assert kept([1, 1, 0], min_p=1) == [0, 1]

    def test_top_n_sigma_is_relative_to_the_largest_whatever_the_temperature(self):
        logits = [4.0, 3.0, 2.0, 1.0, 0.0]  # the standard deviation is the root of 2
        for temperature in (0.3, 1.0, 2.0):
            assert kept(logits, temperature, top_n_sigma=1) == [0, 1]
            assert kept(logits, temperature, top_n_sigma=1.42) == [0, 1, 2]
            assert kept(logits, temperature, top_n_sigma=0.7) == [0]
            assert kept(logits, temperature, top_n_sigma=0) == [0, 1, 2, 3, 4]
        assert kept([2.5, 2.5, 2.5], top_n_sigma=0.1) == [0, 1, 2]
        assert kept(logits, top_n_sigma=1.42, top_k=2) == kept(logits, top_n_sigma=1) == [0, 1]
        assert kept([0.0, 0.0, 0.0, 0.0, 9.0], top_n_sigma=2, top_p=0.1) == [4]

    def test_top_n_sigma_counts_no_masked_token(self):
        logits = [4.0, -INF, 3.0, 2.0, -INF, 1.0, 0.0]
        assert kept(logits, top_n_sigma=1) == [0, 2]
        assert kept([-INF, -3.0, -INF], top_n_sigma=2) == [1]
        assert kept([-INF, -INF], top_n_sigma=2) == []

    def test_the_standard_deviation_is_that_of_numpy(self):
        logits = random_logits(8, 5000) * torch.logspace(-1, 1.5, 8)[:, None] - 40
        expected = torch.from_numpy(logits.double().numpy().std(axis=1))
        torch.testing.assert_close(deviation(logits).double(), expected, rtol=1e-5, atol=1e-4)
        masked = logits.masked_fill(torch.rand(8, 5000) < 0.5, -INF)
        left = [row[row > -INF].double().numpy().std() for row in masked]
        expected = torch.tensor(left, dtype=torch.float64)
        torch.testing.assert_close(deviation(masked).double(), expected, rtol=1e-5, atol=1e-4)

    def test_top_p_renormalises_what_min_p_and_top_k_leave(self):
        logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
        assert kept(logits, top_p=0.5) == [0, 1]
        assert kept(logits, top_k=2, top_p=0.5) == [0]  # 0.4 of 0.7 reaches it
        assert kept(logits, min_p=0.7, top_p=0.5) == [0]

    def test_masked_tokens_are_never_kept(self):
        assert kept([-INF, 1, -INF, 2], top_k=3, top_p=0.999, min_p=0.01) == [1, 3]

    def test_a_long_flat_tail_keeps_its_weight(self):
        """Every token of the tail has 1e-6 of the first one's weight, together they have half."""
        logits = [0.0] + [-math.log(1e6)] * 200_000
        assert len(kept(logits, top_p=0.9)) == round((0.9 * 1.2 - 1) * 1e6) + 1


def test_a_filter_that_is_off_changes_no_bit():
    logits, plain = random_logits(9, 301), rows_of(9, 0.7)
    off = rows_of(9, 0.7, min_p=0.0, top_k=0, top_p=1.0, top_n_sigma=0.0)
    assert torch.equal(perturb(logits, off), perturb(logits, plain))


def test_a_row_is_filtered_the_same_alone_and_in_any_batch():
    count = 24
    logits = random_logits(count, 1003)
    rows = SamplingRows(
        temperature=torch.tensor([0.0, 0.3, 1.0, 1.7]).repeat(6),
        seed=torch.arange(count) * 77,
        output_index=torch.arange(count),
        filters={
            "min_p": torch.tensor([0.0, 0.05, 0.0]).repeat(8),
            "top_k": torch.tensor([0, 3, 50, 1000]).repeat_interleave(6),
            "top_p": torch.tensor([1.0, 0.9, 0.5, 0.0, 1.0, 0.99]).repeat(4),
            "top_n_sigma": torch.tensor([0.0, 2.5, 0.0, 1.0]).repeat_interleave(6),
        },
    )
    together = perturb(logits, rows)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    for chosen in (order, *torch.arange(count).split(1)):
        part = SamplingRows(
            temperature=rows.temperature[chosen],
            seed=rows.seed[chosen],
            output_index=rows.output_index[chosen],
            filters={name: values[chosen] for name, values in rows.filters.items()},
        )
        assert torch.equal(perturb(logits[chosen], part), together[chosen])


def test_greedy_rows_take_the_lowest_id_of_equals_whatever_their_filters():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]] * 3)
    rows = rows_of(3, 0.0, top_k=3, top_p=0.5, min_p=0.2)
    assert torch.equal(perturb(logits, rows), logits)
    assert perturb(logits, rows).argmax(-1).tolist() == [1, 1, 1]


def test_samples_follow_the_softmax():
    """Chi-square at 0.1 %, over seeds at one index and over the indices of one seed."""
    draws, logits = 20_000, torch.tensor([1.0, 0.0, -1.0, 2.0, -INF, 0.5, -2.0, 1.5])
    for axis in ("seed", "output_index"):
        rows = replace(
            rows_of(draws, 0.8),
            **{
                "seed": torch.full((draws,), 5),
                "output_index": torch.full((draws,), 5),
                axis: torch.arange(draws),
            },
        )
        tokens = perturb(logits.expand(draws, -1), rows).argmax(-1)
        counts = tokens.bincount(minlength=8).float()
        expected = (logits / 0.8).softmax(-1) * draws
        assert counts[4] == 0
        possible = expected > 0
        assert (((counts - expected) ** 2 / expected)[possible]).sum() < 22.5  # 6 degrees


def test_each_penalty_counts_the_tokens_of_prompt_or_output_that_it_should():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]]).repeat(2, 1)
    seen = torch.tensor([[True, True, False, False, False]] * 2)
    counts = torch.tensor([[0, 0, 3, 1, 0]] * 2, dtype=torch.int32)
    penalized = penalize(
        logits,
        seen,
        counts,
        repetition=torch.tensor([2.0, 1.0]),
        frequency=torch.tensor([0.25, 0.0]),
        presence=torch.tensor([0.5, 0.0]),
    )
    assert penalized[0].tolist() == [1.0, -4.0, 1 - 0.75 - 0.5, -4 - 0.25 - 0.5, 2.0]
    assert torch.equal(penalized[1], logits[1])


def test_bias_adds_up_with_padding_and_masks():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    ids, bias = torch.tensor([[2, 0, 0, 0, 2]]), torch.tensor([[0.5, 4.0, 0.0, 0.0, -INF]])
    assert add_bias(logits, ids, bias).tolist() == [[5.0, 2.0, -INF]]
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


class TestTopLogprobs:
    def test_top_logprobs_equal_log_softmax(self):
        logits, tokens = random_logits(6, 97), torch.arange(6) * 13
        scores = top_logprobs(logits, tokens, 5)
        wanted = logits.double().log_softmax(-1)
        torch.testing.assert_close(
            scores.logprob.double(), wanted[range(6), tokens], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            scores.top_logprobs.double(), wanted.topk(5).values, atol=1e-5, rtol=0
        )

    def test_top_logprobs_prefer_the_lower_id_among_equals(self):
        logits = random_logits(8, 500).round()
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        for k in (0, 1, 20, 500):
            assert torch.equal(top_logprobs(logits, order[:, 0], k).top_ids, order[:, :k])

    def test_ranks_are_places_in_the_order_of_all_tokens(self):
        logits = random_logits(8, 500).round()
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        for place in (0, 1, 19, 20, 300, 499):
            assert top_logprobs(logits, order[:, place], 0).rank.tolist() == [place + 1] * 8

    def test_top_logprobs_order_every_kind_of_float(self):
        logits = torch.tensor([[-INF, 0.0, -0.0, 1e-40, -1e-40, -3e38, 3e38, -INF, 0.0]])
        ids = top_logprobs(logits, torch.tensor([0]), 9).top_ids
        assert ids.tolist() == [[6, 3, 1, 2, 8, 4, 5, 0, 7]]

    def test_top_logprobs_of_a_vocabulary_smaller_than_k_list_all_tokens(self):
        assert top_logprobs(torch.zeros(1, 3), torch.tensor([1]), 20).top_ids.shape == (1, 3)

    def test_top_logprobs_of_count_0_have_no_alternatives(self):
        scores = top_logprobs(random_logits(2, 9), torch.tensor([0, 1]), 0)
        assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 0)
        assert scores.top_ids.dtype == torch.int64


def test_margin_is_the_lead_of_the_best():
    assert margin(torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, -INF]])).tolist() == [0.5, 0.0]
