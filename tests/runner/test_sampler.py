"""The sampler against a plain oracle, and the independence of a slot's tokens from the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling_oracle import choose, logprobs

from minisgl.kernels.sampling.listed import list_logprobs
from minisgl.kernels.sampling.reference import margin, top_logprobs
from minisgl.request import MAX_LOGIT_BIAS, SamplingParams
from minisgl.runner.sampled_rows import SampledRows
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import (
    VARIANT_FEATURES,
    SamplingFeatures,
    SamplingVariant,
    Scoring,
)
from minisgl.scheduler.plan import SlotJoin

VOCAB = 37
NOISE = 1e-5  # a smaller margin may be decided either way


def make_join(
    slot: int,
    params: SamplingParams,
    *,
    seed: int = 1,
    prompt: Sequence[int] = (1, 2, 3),
    outputs: Sequence[int] = (),
    stop: Sequence[int] = (),
) -> SlotJoin:
    return SlotJoin(slot, params, seed, frozenset(stop), prompt, outputs)


def make_sampler(num_slots: int = 8, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(num_slots, vocab_size, torch.device("cpu"))


def sample(
    sampler: Sampler,
    joins: Sequence[SlotJoin],
    logits: torch.Tensor,
    ahead: int = 0,
) -> SampledRows:
    """Samples a row for each request, `ahead` tokens after those that it joined with."""
    slots = [join.slot for join in joins]
    index = torch.tensor([len(join.output_token_ids) + ahead for join in joins])
    return sampler.sample(logits, torch.tensor(slots), index, sampler.features(slots))


def perturbed(
    sampler: Sampler, slots: Sequence[int], logits: torch.Tensor, index: Sequence[int]
) -> torch.Tensor:
    features = sampler.features(slots)
    return sampler.perturbed(logits, torch.tensor(slots), torch.tensor(index), features)


def margins(sampler: Sampler, joins: Sequence[SlotJoin], logits: torch.Tensor) -> torch.Tensor:
    slots = [join.slot for join in joins]
    index = [len(join.output_token_ids) for join in joins]
    return margin(perturbed(sampler, slots, logits, index))


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    """Half of the values are rounded, so that equal logits are common."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.where(torch.arange(vocab_size) % 2 == 0, logits.round(), logits)


token_ids = st.integers(0, VOCAB - 1)
params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.0, 0.0, 0.41, 1.37, 2.7]),
    min_tokens=st.integers(0, 4),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 1.1]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.8]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -2.5, 3.0]), max_size=5),
    logprobs=st.sampled_from([None, 0, 4]),
)


@st.composite
def batches(draw: st.DrawFn) -> list[SlotJoin]:
    slots = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    return [
        make_join(
            slot,
            draw(params_of_any_kind),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            prompt=draw(st.lists(token_ids, min_size=1, max_size=12)),
            outputs=draw(st.lists(token_ids, max_size=6)),
            stop=draw(st.lists(token_ids, max_size=4)),
        )
        for slot in slots
    ]


def test_every_row_matches_the_oracle():
    """Slots are taken over from other requests, which must leave nothing behind."""
    compared = excused = 0

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(batches(), batches(), st.integers(0, 1000))
    def check(before: list[SlotJoin], joins: list[SlotJoin], seed: int) -> None:
        nonlocal compared, excused
        sampler = make_sampler()
        sampler.join(before)
        sample(sampler, before, random_logits(len(before), seed + 1))
        sampler.join(joins)
        logits = random_logits(len(joins), seed)
        untouched = logits.clone()
        tokens = sample(sampler, joins, logits).token_ids.tolist()
        assert torch.equal(logits, untouched)
        for row, join in enumerate(joins):
            choice = choose(logits[row].numpy(), join)
            compared += 1
            if tokens[row] != choice.token_id:
                assert choice.margin < NOISE, (join, choice)
                excused += 1

    check()
    assert excused <= compared / 100


def varied_joins(count: int) -> list[SlotJoin]:
    """Requests of every kind, in slots 0 to count - 1."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.4, top_k=9, min_p=0.01),
        SamplingParams(presence_penalty=0.4, repetition_penalty=1.3),
        SamplingParams(logit_bias={3: 2.0, 30: -100.0}, logprobs=3),
        SamplingParams(min_tokens=3, frequency_penalty=1.0, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.8, top_n_sigma=1.2, top_p=0.9),
    ]
    return [
        make_join(
            slot,
            kinds[slot % len(kinds)],
            seed=slot * 991,
            prompt=range(slot + 1),
            outputs=[5, 7, 5][: slot % 4],
            stop=[0, 9],
        )
        for slot in range(count)
    ]


class TestIndependence:
    def test_tokens_are_the_same_alone_or_batched_in_any_order_and_slot(self):
        joins, logits = varied_joins(20), random_logits(20)
        sampler = make_sampler(20)
        sampler.join(joins)
        slots = [join.slot for join in joins]
        index = [len(join.output_token_ids) for join in joins]
        together = perturbed(sampler, slots, logits, index)

        order = torch.randperm(20, generator=torch.Generator().manual_seed(4)).tolist()
        permuted = perturbed(sampler, order, logits[order], [index[row] for row in order])
        assert torch.equal(permuted, together[order])
        for row, join in enumerate(joins):
            slot = (row * 7 + 3) % 20  # another slot, of another sampler, which had an owner
            other = make_sampler(20)
            other.join([make_join(slot, joins[-row].params, outputs=[1, 1, 8], stop=[2])])
            other.join(
                [
                    make_join(
                        slot,
                        join.params,
                        seed=join.seed,
                        prompt=join.prompt_token_ids,
                        outputs=join.output_token_ids,
                        stop=[0, 9],
                    )
                ]
            )
            alone = perturbed(other, [slot], logits[row, None], [index[row]])
            assert torch.equal(alone[0], together[row])

    def test_tokens_are_a_function_of_seed_and_index(self):
        logits = torch.zeros(1, VOCAB)

        def tokens(seed: int) -> list[int]:
            sampler, join = make_sampler(), make_join(2, SamplingParams(), seed=seed)
            sampler.join([join])
            return [sample(sampler, [join], logits, ahead=i).token_ids.item() for i in range(30)]

        assert tokens(7) == tokens(7)
        assert len(set(tokens(7))) > 10
        assert tokens(7) != tokens(8)
        assert tokens(7) != tokens(7 + 2**32)


class TestNothingMoreThanNeeded:
    def test_a_greedy_batch_is_the_argmax_of_the_raw_logits(self):
        sampler, logits = make_sampler(), random_logits(2)
        joins = [make_join(slot, SamplingParams(temperature=0, top_p=0.5)) for slot in (0, 1)]
        sampler.join(joins)
        assert perturbed(sampler, [0, 1], logits, [0, 0]) is logits
        sampled = sample(sampler, joins, logits)
        assert torch.equal(sampled.token_ids, logits.argmax(-1))
        assert sampled.scores is None and not sampler.features([0, 1]).full

    def test_padded_rows_are_greedy_and_change_no_other_row(self):
        """They are of the scratch slot, which comes behind the last one, wherever they stand."""
        sampler, logits = make_sampler(), random_logits(5)
        join = make_join(7, SamplingParams(repetition_penalty=1.5, logit_bias={0: 1.0}))
        sampler.join([join])
        alone = perturbed(sampler, [7], logits[2:3], [0])
        padded, index = torch.tensor([8, 8, 7, 8, 8], dtype=torch.int32), torch.zeros(5).long()
        features = sampler.features([7])
        together = sampler.perturbed(logits, padded, index, features)
        assert torch.equal(together[2:3], alone)
        for _ in range(3):
            tokens = sampler.sample(logits, padded, index, features).token_ids
            others = [0, 1, 3, 4]
            assert torch.equal(tokens[others], logits[others].argmax(-1))

    def test_sampling_with_unneeded_features_changes_no_token(self):
        """A captured step does all that its variant can."""
        joins, logits = varied_joins(7), random_logits(7)
        slots, index = torch.arange(7), torch.tensor([len(j.output_token_ids) for j in joins])
        everything = VARIANT_FEATURES[SamplingVariant.FULL]
        sampler = make_sampler()
        sampler.join(joins)
        exactly = sampler.perturbed(logits, slots, index, sampler.features(range(7)))
        assert torch.equal(sampler.perturbed(logits, slots, index, everything), exactly)
        sampled = sampler.sample(logits, slots, index, everything)
        assert torch.equal(sampled.token_ids, exactly.argmax(-1))

    def test_the_features_of_a_batch_are_those_that_its_slots_need(self):
        sampler = make_sampler(20)
        sampler.join(varied_joins(8))
        assert sampler.features([]) == sampler.features([0, 20]) == SamplingFeatures()
        assert sampler.features([3, 1]) == SamplingFeatures(random=True, filters={"min_p", "top_k"})
        assert sampler.features([7, 1]) == SamplingFeatures(
            random=True, filters={"top_n_sigma", "top_p"}
        )
        assert sampler.features([0, 2]) == SamplingFeatures(random=True, filters={"top_p"})
        assert sampler.features([6, 5, 4]) == SamplingFeatures(
            random=True,
            filters={"top_k", "top_p"},
            penalties=True,
            num_edits=2,
            num_logprobs=3,
        )
        full = [sampler.features([slot]).full for slot in range(8)]
        assert full == [False, False, False, False, True, True, True, True]
        assert sampler.logprobs_wanted([4, 5, 19]) == [None, 3, None]
        sampler.join([make_join(5, SamplingParams(temperature=0))])
        assert sampler.features([5]) == SamplingFeatures() and sampler.logprobs_wanted([5]) == [
            None
        ]

    def test_half_precision_logits_are_sampled_as_float32(self):
        joins, logits = varied_joins(14), random_logits(14).bfloat16()
        sampler = make_sampler(14)
        sampler.join(joins)
        slots, index = torch.arange(14), torch.tensor([len(j.output_token_ids) for j in joins])
        features = sampler.features(range(14))
        expected = sampler.perturbed(logits.float(), slots, index, features)
        assert torch.equal(sampler.perturbed(logits, slots, index, features), expected)
        sampled, before = sample(sampler, joins, logits), logits.clone()
        assert torch.equal(sampled.token_ids, expected.argmax(-1))
        assert sampled.scores is not None and sampled.scores.logprob.dtype == torch.float32
        assert torch.equal(logits, before)

    def test_joining_no_requests_is_accepted(self):
        make_sampler().join([])


class TestStopTokens:
    def test_stop_tokens_are_masked_until_min_tokens(self):
        sampler = make_sampler()
        logits = torch.zeros(1, VOCAB)
        logits[0, 4], logits[0, 6], logits[0, 11] = 9, 8, 7
        join = make_join(0, SamplingParams(temperature=0, min_tokens=2), stop=[4, 6])
        sampler.join([join])
        tokens = [sample(sampler, [join], logits, ahead=i).token_ids.item() for i in range(4)]
        assert tokens == [11, 11, 4, 4]

    def test_a_resumed_request_goes_on_counting(self):
        sampler, logits = make_sampler(), torch.eye(1, VOCAB)
        params = SamplingParams(temperature=0, min_tokens=2)
        join = make_join(0, params, stop=[0], outputs=[5])
        sampler.join([join])
        assert sample(sampler, [join], logits).token_ids.item() != 0
        assert sample(sampler, [join], logits, ahead=1).token_ids.item() == 0

    def test_a_bias_does_not_lift_the_mask(self):
        sampler = make_sampler()
        params = SamplingParams(temperature=0, min_tokens=1, logit_bias={0: 100.0})
        join = make_join(0, params, stop=[0])
        sampler.join([join])
        assert sample(sampler, [join], torch.zeros(1, VOCAB)).token_ids.item() == 1
        assert sample(sampler, [join], torch.zeros(1, VOCAB), ahead=1).token_ids.item() == 0


class TestEdits:
    def test_ids_beyond_the_vocabulary_are_ignored(self):
        sampler = make_sampler()
        params = SamplingParams(temperature=0, min_tokens=1, logit_bias={VOCAB: 5.0, 2: 1.0})
        join = make_join(0, params, stop=[VOCAB + 1])
        sampler.join([join])
        assert sample(sampler, [join], torch.zeros(1, VOCAB)).token_ids.item() == 2

    def test_a_request_with_the_most_biases_and_stop_tokens_is_applied(self):
        vocab = 2 * MAX_LOGIT_BIAS
        sampler = make_sampler(2, vocab)
        bias = dict.fromkeys(range(MAX_LOGIT_BIAS), -50.0)
        stop = range(MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + 64)
        join = make_join(0, SamplingParams(temperature=0, logit_bias=bias, min_tokens=1), stop=stop)
        sampler.join([join])
        assert sample(sampler, [join], torch.zeros(1, vocab)).token_ids.item() == stop[-1] + 1


class TestHistory:
    params = SamplingParams(temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2)

    def test_a_look_ahead_step_sees_the_token_sampled_before_it(self):
        """Tokens sampled one after the other, unseen by the host, count as if it had sent them."""
        logits, outputs = random_logits(12), []
        ahead = make_sampler()
        first = make_join(3, self.params, prompt=[1, 1, 8])
        ahead.join([first])
        for step in range(12):
            resumed = make_sampler()
            join = make_join(0, self.params, prompt=[1, 1, 8], outputs=outputs)
            resumed.join([join])
            row = logits[step, None]
            expected = perturbed(resumed, [0], row, [step])
            assert torch.equal(perturbed(ahead, [3], row, [step]), expected)
            outputs.append(sample(ahead, [first], row, ahead=step).token_ids.item())
        assert len(outputs) > len(set(outputs))  # some counts went beyond 1

    def test_a_reassigned_slot_keeps_nothing_of_its_last_request(self):
        sampler, logits = make_sampler(), random_logits(1)
        old = make_join(0, self.params, prompt=range(VOCAB), outputs=range(VOCAB))
        sampler.join([old])
        sample(sampler, [old], logits)
        # One without penalties does not clean up; the next one with penalties must not notice.
        plain = make_join(0, SamplingParams(temperature=0), outputs=[1])
        penalized = make_join(1, self.params)
        sampler.join([plain, penalized])
        both = sample(sampler, [plain, penalized], logits.repeat(2, 1)).token_ids
        assert both[0] == logits.argmax()
        new = make_join(0, self.params, seed=9)
        sampler.join([new])
        fresh = make_sampler()
        fresh.join([new])
        assert torch.equal(perturbed(sampler, [0], logits, [0]), perturbed(fresh, [0], logits, [0]))

    def test_the_sampler_may_be_allocated_before_use(self):
        """Its tensors then stay at the addresses that captured steps read."""
        logits, join = random_logits(1), make_join(2, self.params, outputs=[5, 5])
        early, late = make_sampler(), make_sampler()
        early.tables.allocate_history()
        counts = early.tables.output_counts
        for sampler in (early, late):
            sampler.join([join])
        early.tables.allocate_history()
        assert early.tables.output_counts is counts
        seen = [perturbed(sampler, [2], logits, [2]) for sampler in (early, late)]
        assert torch.equal(*seen)

    def test_prompt_lengths_are_kept_by_slot(self):
        sampler = make_sampler()
        sampler.join([make_join(2, self.params, prompt=range(9)), make_join(5, SamplingParams())])
        assert sampler.num_prompt_tokens.tolist() == [0, 0, 9, 0, 0, 3, 0, 0, 0]


class TestLogprobs:
    def test_each_row_gets_its_requested_logprobs_from_the_raw_logits(self):
        sampler, logits = make_sampler(), random_logits(4)
        bias = {0: 100.0}
        joins = [
            make_join(4, SamplingParams(logit_bias=bias, logprobs=2)),
            make_join(1, SamplingParams(logit_bias=bias, logprobs=0)),
            make_join(6, SamplingParams(logit_bias=bias)),
            make_join(0, SamplingParams(temperature=0.1, logprobs=5)),
        ]
        sampler.join(joins)
        sampled = sample(sampler, joins, logits)
        assert sampled.scores is not None and sampled.scores.top_ids.shape == (4, 5)
        tokens = sampled.token_ids.tolist()
        assert tokens[:3] == [0, 0, 0]
        wanted = sampler.logprobs_wanted([join.slot for join in joins])
        assert wanted == [2, 0, None, 5]
        listed = list_logprobs(tokens, sampled.scores, wanted)
        assert {row: len(entry.top) for row, entry in listed.items()} == {0: 2, 1: 0, 3: 5}
        raw = logits.double().log_softmax(-1)
        order = logits.sort(dim=-1, descending=True, stable=True).indices.tolist()
        for row, entry in listed.items():
            assert entry.token_id == tokens[row]
            assert entry.logprob == pytest.approx(raw[row, tokens[row]].item(), abs=1e-5)
            assert [token_id for token_id, _ in entry.top] == order[row][: len(entry.top)]
            assert entry.rank == 1 + order[row].index(entry.token_id)
            for token_id, logprob in entry.top:
                assert logprob == pytest.approx(raw[row, token_id].item(), abs=1e-5)

    def test_processed_logprobs_are_those_of_the_draw(self):
        """Bias, penalties, min_tokens, temperature and every filter, alone and together."""
        joins, logits = varied_joins(32), random_logits(32)
        joins = [replace(each, params=replace(each.params, logprobs=20)) for each in joins]
        sampler = Sampler(32, VOCAB, torch.device("cpu"), scoring=Scoring(processed=True))
        sampler.join(joins)
        slots = torch.tensor([join.slot for join in joins])
        index = torch.tensor([len(join.output_token_ids) for join in joins])
        sampled = sampler.sample(logits, slots, index, sampler.features(slots.tolist()))
        assert sampled.scores is not None
        tokens = sampled.token_ids.tolist()
        listed = list_logprobs(tokens, sampled.scores, [20] * 32)
        for row, join in enumerate(joins):
            wanted, entry = logprobs(logits[row].numpy(), join), listed[row]
            assert entry.logprob == pytest.approx(wanted[tokens[row]], abs=1e-5)
            for place, (token_id, logprob) in enumerate(entry.top):
                if place < len(wanted):
                    assert logprob == pytest.approx(wanted[token_id], abs=1e-5)
                else:
                    assert logprob == -math.inf and token_id not in wanted

    def test_prompt_logprobs_list_each_target_with_its_alternatives(self):
        logits, targets = random_logits(5), [3, 1, 4, 1, 5]
        scores = top_logprobs(logits, torch.tensor(targets), 2)
        listed = list(list_logprobs(targets, scores, [2] * 5).values())
        assert [entry.token_id for entry in listed] == targets
        assert all(len(entry.top) == 2 and entry.logprob <= entry.top[0][1] for entry in listed)

    def test_masked_tokens_have_a_logprob_of_minus_infinity(self):
        logits = torch.tensor([[0.0, -math.inf]])
        listed = list_logprobs([1], top_logprobs(logits, torch.tensor([1]), 2), [2])
        assert listed[0].logprob == -math.inf and listed[0].top == ((0, 0.0), (1, -math.inf))


def test_margins_give_the_lead_of_the_chosen_token():
    sampler, logits = make_sampler(20), random_logits(20)
    joins = varied_joins(20)
    sampler.join(joins)
    for row, gap in enumerate(margins(sampler, joins, logits).tolist()):
        assert gap == pytest.approx(choose(logits[row].numpy(), joins[row]).margin, abs=NOISE)


def test_every_sampling_option_changes_the_oracles_tokens():
    """An option without effect on the oracle could not be checked by the comparison above."""
    plain = SamplingParams()
    options = [
        {"temperature": 0.3},
        {"top_p": 0.2},
        {"top_k": 2},
        {"min_p": 0.3},
        {"top_n_sigma": 0.7},
        {"min_tokens": 4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"logit_bias": {2: 3.0}},
    ]
    logits = random_logits(200).numpy()

    def tokens(params: SamplingParams) -> np.ndarray:
        join = make_join(0, params, prompt=range(9), outputs=[4, 4], stop=range(10, 20))
        return np.array([choose(row, join).token_id for row in logits])

    for option in options:
        assert (tokens(SamplingParams(**option)) != tokens(plain)).any(), option
