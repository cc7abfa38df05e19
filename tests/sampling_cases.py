"""Batches for the sampling kernels, and the comparison with the torch sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.kernels.sampling import margin, top_logprobs
from minisgl.kernels.triton_sampling import (
    NUM_RIVALS,
    SampleWorkspace,
    SamplingTables,
    sample,
    sample_full,
)
from minisgl.request import SamplingParams
from minisgl.runner.sampler import Sampler, _History
from minisgl.scheduler.plan import SlotJoin

NOISE = 2e-5  # a smaller margin may be decided either way

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
]


@dataclass(frozen=True)
class Batch:
    """Rows of requests that have joined a sampler, each row in a slot of its own."""

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
    ) -> Batch:
        """Row r has the r-th of `params`, round and round. The slots are mixed up."""
        device, vocab_size = logits.device, logits.shape[1]
        sampler = Sampler(num_slots or num_rows + 2, vocab_size, device)
        sampler._history = _History(num_slots or num_rows + 2, vocab_size, device)
        slots = [(row * 7 + 3) % num_rows if num_rows % 7 else row for row in range(num_rows)]
        cls.join(sampler, params, slots, vocab_size)
        index = torch.tensor([row % 4 for row in range(num_rows)], device=device)
        return cls(sampler, logits, torch.tensor(slots, device=device), index)

    @staticmethod
    def join(
        sampler: Sampler, params: Sequence[SamplingParams], slots: Sequence[int], vocab_size: int
    ) -> None:
        outputs = [5, 2, 5, 3]
        sampler.join(
            [
                SlotJoin(
                    slot,
                    params[row % len(params)],
                    seed=row * 0x123456789ABCD - 77,
                    stop_token_ids=frozenset([1, 3, min(row, vocab_size - 1)]),
                    prompt_token_ids=[(row * 31 + i * i) % vocab_size for i in range(row + 1)],
                    output_token_ids=[token % vocab_size for token in outputs[: row % 4]],
                )
                for row, slot in enumerate(slots)
            ]
        )

    def tables(self) -> SamplingTables:
        """The sampler's own tensors."""
        sampler = self.sampler
        assert sampler._history is not None
        wanted = [need.num_logprobs for need in sampler._needs]
        return SamplingTables(
            sampler._floats,
            sampler._integers,
            sampler._edit_ids,
            sampler._edit_bias,
            sampler._history.prompt_seen,
            sampler._history.output_counts,
            torch.tensor(wanted, dtype=torch.int32, device=self.logits.device),
        )

    def run(self, *, full: bool = False, rows: Sequence[int] | None = None) -> Tensor:
        """The kernels' tokens, of all rows or of some as a batch of their own."""
        chosen = torch.arange(len(self.slots)) if rows is None else torch.tensor(rows)
        chosen = chosen.to(self.logits.device)
        logits = self.logits[chosen]
        space = SampleWorkspace(len(chosen), logits.shape[1], logits.device, full=full)
        # What is left in memory must not matter.
        for buffer in (space.best, space.sums, space.group_list):
            buffer.fill_(-7)
        space.group_max.fill_(torch.nan)
        tokens = torch.full((len(chosen),), -1, dtype=torch.int64, device=logits.device)
        before = logits.clone()
        draw = sample_full if full else sample
        draw(logits, self.slots[chosen], self.output_index[chosen], self.tables(), space, tokens)
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        assert not space.arrivals.any()
        return tokens

    def perturbed(self) -> Tensor:
        """Of the torch sampler, which casts to float32 first."""
        logits, slots = self.logits.float(), self.slots
        return self.sampler.perturbed(logits, slots, slots.tolist(), self.output_index)

    def check(self, tokens: Tensor) -> int:
        """That they are the reference's; how many near-ties were decided the other way."""
        perturbed = self.perturbed()
        wanted = perturbed.argmax(dim=-1)
        different = tokens != wanted
        near = margin(perturbed) < NOISE * (1 + perturbed.amax(dim=-1).abs() / 16)
        bad = (different & ~near).nonzero().flatten().tolist()
        assert not bad, [(row, tokens[row].item(), wanted[row].item()) for row in bad]
        return int(different.sum())

    def check_scores(self, space: SampleWorkspace, tokens: Tensor) -> None:
        scores = space.scores
        assert scores is not None
        num_rivals = min(NUM_RIVALS, self.logits.shape[1])
        wanted = top_logprobs(self.logits.float(), tokens, num_rivals)
        for row, slot in enumerate(self.slots.tolist()):
            num = min(self.sampler._needs[slot].num_logprobs, num_rivals)
            if num < 0:
                continue
            assert torch.equal(scores.top_ids[row, :num], wanted.top_ids[row, :num]), row
            torch.testing.assert_close(scores.logprob[row], wanted.logprob[row], atol=2e-5, rtol=0)
            torch.testing.assert_close(
                scores.top_logprobs[row, :num], wanted.top_logprobs[row, :num], atol=2e-5, rtol=0
            )


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
