"""Batches for the sampling kernels, and the comparison with the torch sampler."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minisgl.kernels.sampling.order import ids_of
from minisgl.kernels.sampling.reference import TokenScores, margin
from minisgl.matcher import mask_words
from minisgl.request import SamplingParams
from minisgl.runner.sampled_rows import SampledRows
from minisgl.runner.sampler import Sampler
from minisgl.runner.sampling_features import (
    RAW_SCORES,
    VARIANT_FEATURES,
    SamplingFeatures,
    SamplingVariant,
    Scoring,
)
from minisgl.scheduler.plan import SlotJoin

NOISE = 2e-5  # a smaller margin may be decided either way

# What a captured step is captured for.
ANY_PLAIN = VARIANT_FEATURES[SamplingVariant.FILTERED]
ANY_FULL = VARIANT_FEATURES[SamplingVariant.FULL]

PLAIN = {
    "greedy": [SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)],
    "temperature": [SamplingParams(temperature=t) for t in (0.6, 1.0, 0.01, 2.0)],
    "min_p": [SamplingParams(temperature=1.3, min_p=p) for p in (0.02, 0.3, 1.0)],
    "top_k": [SamplingParams(temperature=1.5, top_k=k) for k in (1, 2, 50, 64, 65, 200, 10**9)],
    "top_p": [SamplingParams(temperature=1.2, top_p=p) for p in (0.0, 0.1, 0.5, 0.9, 0.999)],
    "all": [
        SamplingParams(temperature=1.1, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, top_k=100, top_p=0.6),
        SamplingParams(temperature=1.9, top_k=7, top_p=0.2),
        SamplingParams(temperature=1.4, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1.6, top_k=90, min_p=0.001),
        SamplingParams(temperature=2.0, top_k=60, min_p=0.6),
    ],
}
MIXED = [params for kind in zip(*([*k, *k, *k][:3] for k in PLAIN.values())) for params in kind]  # noqa: B905
FULL = [
    SamplingParams(temperature=0, logit_bias={3: 9.0, 4: -100.0}, min_tokens=2, logprobs=20),
    SamplingParams(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=-0.4),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.8, frequency_penalty=1.1, logprobs=0),
    SamplingParams(temperature=1.2, logit_bias={0: 2.5, 1: 3.0, 2: -1.0}, repetition_penalty=0.6),
    SamplingParams(temperature=1.2, top_p=0.8, min_tokens=9, presence_penalty=1.0, logprobs=5),
    SamplingParams(temperature=0.9, min_p=0.1, logprobs=1),
    SamplingParams(temperature=1.3, top_n_sigma=2.1),
    SamplingParams(temperature=1.9, top_n_sigma=1.4, top_p=0.7, logprobs=2),
    SamplingParams(top_n_sigma=2.6, top_k=30, top_p=0.9, repetition_penalty=1.4),
    SamplingParams(temperature=0.4, top_n_sigma=0.2, min_p=0.02, logit_bias={5: -100.0}),
    SamplingParams(temperature=0, top_n_sigma=1.0, presence_penalty=0.2),
]


@dataclass(frozen=True)
class Batch:
    """Rows of requests that have joined a Triton sampler, each row in a slot of its own."""

    sampler: Sampler
    logits: Tensor
    slots: Tensor
    output_index: Tensor

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        num_rows: int,
        logits: Tensor,
        *,
        num_slots: int | None = None,
        allowed: Mapping[int, Sequence[int]] | None = None,
        scoring: Scoring = RAW_SCORES,
    ) -> Batch:
        """Row r has the r-th of `params`, round and round. The slots are mixed up."""
        device, vocab_size = logits.device, logits.shape[1]
        num_slots = num_slots or num_rows + 2
        sampler = Sampler(num_slots, vocab_size, device, backend="triton", scoring=scoring)
        slots = [(row * 7 + 3) % num_rows if num_rows % 7 else row for row in range(num_rows)]
        cls.join(sampler, params, slots, masked=frozenset(allowed or ()))
        if allowed:
            masked = tuple(slots[row] for row in allowed)
            sampler.mask(masked, packed_masks(list(allowed.values()), vocab_size).to(logits.device))
        index = torch.tensor([row % 4 for row in range(num_rows)], device=device)
        return cls(sampler, logits, torch.tensor(slots, device=device), index)

    @staticmethod
    def join(
        sampler: Sampler,
        params: Sequence[SamplingParams],
        slots: Sequence[int],
        *,
        masked: frozenset[int] = frozenset(),
    ) -> None:
        outputs, vocab_size = [5, 2, 5, 3], sampler.vocab_size
        sampler.join(
            [
                SlotJoin(
                    slot,
                    params[row % len(params)],
                    seed=row * 0x123456789ABCD - 77,
                    stop_token_ids=frozenset([1, 3, min(row, vocab_size - 1)]),
                    prompt_token_ids=[(row * 31 + i * i) % vocab_size for i in range(row + 1)],
                    output_token_ids=[token % vocab_size for token in outputs[: row % 4]],
                    masked=row in masked,
                )
                for row, slot in enumerate(slots)
            ]
        )

    def sample(self, features: SamplingFeatures) -> SampledRows:
        return self.sampler.sample(self.logits, self.slots, self.output_index, features)

    def run(self, *, full: bool = False, rows: Sequence[int] | None = None) -> Tensor:
        """The tokens of all rows, or of some as a batch of their own."""
        chosen = torch.arange(len(self.slots)) if rows is None else torch.tensor(rows)
        chosen = chosen.to(self.logits.device)
        logits = self.logits[chosen]
        self._spoil_workspace()
        features = (ANY_FULL if full else ANY_PLAIN)._replace(masked=self.masked)
        args = (self.slots[chosen], self.output_index[chosen], features)
        before = logits.clone()
        tokens = self.sampler.sample(logits, *args).token_ids
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        return tokens

    def _spoil_workspace(self) -> None:
        """Poisons memory: leftover values must not matter."""
        assert self.sampler._triton is not None
        for buffer in vars(self.sampler._triton._workspace).values():
            if isinstance(buffer, Tensor):
                buffer.fill_(torch.nan if buffer.is_floating_point() else -7)

    @property
    def masked(self) -> bool:
        return self.sampler.features(self.slots.tolist()).masked

    def run_parts(self, bounds: Sequence[int]) -> Tensor:
        """The tokens of rows without filters, sampled as by ranks with a part of the ids each."""
        assert self.sampler._triton is not None
        keys: list[Tensor] = []

        def collect(best: Tensor) -> Tensor:
            keys.append(best.amax(dim=1))
            return keys[-1]

        for first, last in pairwise(bounds):
            self.sampler._triton.sample_part(
                self.logits[:, first:last],
                self.slots,
                self.output_index,
                first_id=first,
                all_reduce_max=collect,
                masked=self.masked,
            )
        return ids_of(torch.stack(keys).amax(dim=0))

    def history(self) -> Tensor:
        """Counts of the output tokens, by slot."""
        counts = self.sampler.tables.output_counts
        assert counts is not None
        return counts

    def perturbed(self) -> Tensor:
        """The perturbed logits of the torch reference."""
        features = self.sampler.features(self.slots.tolist())
        return self.sampler.perturbed(self.logits, self.slots, self.output_index, features)

    def check(self, tokens: Tensor) -> int:
        """Asserts equality with the reference; returns the number of near-ties that differ."""
        perturbed = self.perturbed()
        wanted = perturbed.argmax(dim=-1)
        different = tokens != wanted
        near = margin(perturbed) < NOISE * (1 + perturbed.amax(dim=-1).abs() / 16)
        bad = (different & ~near).nonzero().flatten().tolist()
        assert not bad, [(row, tokens[row].item(), wanted[row].item()) for row in bad]
        return int(different.sum())

    def check_full(self, draw: Callable[[], SampledRows]) -> int:
        """The same of what `draw` samples in the full variant, of its scores, and that it counted
        the tokens of the rows with penalties."""
        before = self.history().clone()
        sampled = draw()
        after = self.history().clone()
        self.history().copy_(before)
        differed = self.check(sampled.token_ids)
        assert sampled.scores is not None
        self.check_scores(sampled.scores, sampled.token_ids)
        ones = torch.ones_like(sampled.token_ids, dtype=torch.int32)
        self.history().index_put_((self.slots.long(), sampled.token_ids), ones, accumulate=True)
        for slot in self.slots.tolist():
            if self.sampler.features([slot]).penalties:
                assert torch.equal(after[slot], self.history()[slot])
        return differed

    def check_scores(self, scores: TokenScores, tokens: Tensor) -> None:
        num_rivals = scores.top_ids.shape[1]
        features = self.sampler.features(self.slots.tolist())._replace(num_logprobs=num_rivals)
        wanted = self.sampler.score(self.logits, self.slots, self.output_index, features, tokens)
        asked = self.sampler.logprobs_wanted(self.slots.tolist())
        for row, num in enumerate(asked):
            if num is None:
                continue
            num = min(num, num_rivals)
            assert torch.equal(scores.top_ids[row, :num], wanted.top_ids[row, :num]), row
            assert scores.rank[row] == wanted.rank[row], row
            torch.testing.assert_close(scores.logprob[row], wanted.logprob[row], atol=2e-5, rtol=0)
            torch.testing.assert_close(
                scores.top_logprobs[row, :num], wanted.top_logprobs[row, :num], atol=2e-5, rtol=0
            )


def packed_masks(allowed: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Masks of these ids, as int32. Bits past the vocabulary are set."""
    bits = np.zeros((len(allowed), 32 * mask_words(vocab_size)), dtype=bool)
    bits[:, vocab_size:] = True
    for row, ids in zip(bits, allowed, strict=True):
        row[list(ids)] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def allowed_tokens(num_rows: int, vocab_size: int) -> dict[int, list[int]]:
    """Tokens that two of three rows allow: few, one, many, those of one place, or all."""
    generator = random.Random(vocab_size)
    last = vocab_size - 1
    kinds: list[Callable[[], list[int]]] = [
        lambda: sorted({generator.randrange(vocab_size) for _ in range(4)}),
        lambda: [last],
        lambda: [id for id in range(vocab_size) if generator.random() < 0.5] or [0],
        lambda: list(range(vocab_size // 2, min(vocab_size // 2 + 70, vocab_size))),
        lambda: list(range(vocab_size)),
    ]
    rows = [row for row in range(num_rows) if row % 3]
    return {row: kinds[place % len(kinds)]() for place, row in enumerate(rows)}


def random_logits(
    rows: int,
    vocab_size: int,
    *,
    seed: int = 0,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    """A third of the rows as they come, a third rounded, so that nearly all logits have equals,
    and a third with masked tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator, device=device) * scale
    logits[1::3] = logits[1::3].round()
    masked = torch.rand(len(logits[2::3]), vocab_size, generator=generator, device=device) < 0.4
    logits[2::3] = logits[2::3].masked_fill(masked, -torch.inf)
    return logits.to(dtype)
