"""The sampling state of the slots on one device, and the choice of the tokens of a step.

Everything that `sample` does on the device it queues without waiting. Which work a batch needs is
known on the host from the requests in it, so that a greedy batch costs one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernels.sampling import (
    SamplingRows,
    TokenScores,
    add_bias,
    penalize,
    perturb,
    top_logprobs,
)
from minisgl.request import MAX_EDITS, SamplingParams, TokenLogprobs
from minisgl.scheduler.plan import SlotJoin


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of a step, on the device that sampled them."""

    token_ids: Tensor  # [rows] int64
    # As many rivals a row as the row that asked for most; None where no row asked.
    scores: TokenScores | None
    num_logprobs: Sequence[int | None]  # [rows]: what each row asked for; empty where none did


def list_logprobs(
    token_ids: Sequence[int], scores: TokenScores, num_logprobs: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """What the caller gets, by row, of the rows that asked. `scores` must have reached the host.

    Serves sampled tokens and, with `top_logprobs` of their logits, those of a prompt.
    """
    logprob = scores.logprob.tolist()
    top_ids, top = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    return {
        row: TokenLogprobs(
            token_ids[row],
            logprob[row],
            tuple(zip(top_ids[row][:num], top[row][:num], strict=True)),
        )
        for row, num in enumerate(num_logprobs)
        if num is not None
    }


class _Needs(NamedTuple):
    """The work that a request asks for. A batch needs the maximum of its rows, field by field."""

    random: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    penalties: bool = False
    num_edits: int = 0
    num_logprobs: int = -1  # -1: none, 0: of the sampled token only

    @classmethod
    def of(cls, params: SamplingParams, num_edits: int) -> _Needs:
        random = not params.greedy
        return cls(
            random=random,
            min_p=random and params.min_p > 0,
            top_k=random and params.top_k > 0,
            top_p=random and params.top_p < 1,
            penalties=params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0,
            num_edits=num_edits,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
        )


class _History:
    """Which tokens the requests with penalties contain, by slot. Other slots' rows are garbage,
    which a neutral penalty ignores."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_slots, vocab_size)
        self.prompt_seen = torch.zeros(shape, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def rebuild(self, slot: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        self.prompt_seen[slot].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.output_counts[slot].zero_().index_add_(0, output_ids, ones)

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self.output_counts.index_put_((slots, token_ids), ones, accumulate=True)


class Sampler:
    """Owns the sampling tables of `num_slots` slots. All calls come from one thread and one stream.

    `join` gives a slot to a request, overwriting all that the last one left that still counts;
    `sample` draws a token for each row of a step and adds it to its slot's history.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._needs = [_Needs()] * num_slots
        # temperature, top_p, min_p, repetition, frequency, presence; at first greedy and neutral
        neutral = torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.float32, device=device)
        self._floats = neutral.repeat(num_slots, 1)
        # seed, top_k, min_tokens, num_edits, num_prompt_tokens
        self._integers = torch.zeros((num_slots, 5), dtype=torch.int64, device=device)
        # The first num_edits columns of a slot add to its logits: a request's logit_bias, and -inf
        # for the tokens that end it, which `perturbed` ignores from min_tokens on.
        edits = (num_slots, MAX_EDITS)
        self._edit_ids = torch.zeros(edits, dtype=torch.int64, device=device)
        self._edit_bias = torch.zeros(edits, dtype=torch.float32, device=device)
        self._history: _History | None = None  # allocated for the first request with penalties

    @property
    def num_prompt_tokens(self) -> Tensor:
        """[num_slots] int64, a view: a token's position minus this is its output index."""
        return self._integers[:, 4]

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Queues the writes that give each request its slot. A slot occurs at most once."""
        if not joins:
            return
        floats, integers = [], []
        for join in joins:
            params = join.params
            edits = self._edits(join)
            needs = self._needs[join.slot] = _Needs.of(params, len(edits))
            floats.append(
                (
                    0.0 if params.greedy else params.temperature,
                    params.top_p,
                    params.min_p,
                    params.repetition_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
            num_prompt_tokens = len(join.prompt_token_ids)
            integers.append(
                (join.seed, max(params.top_k, 0), params.min_tokens, len(edits), num_prompt_tokens)
            )
            if edits:
                ids, bias = zip(*edits, strict=True)
                self._edit_ids[join.slot, : len(edits)] = self._upload(ids, torch.int64)
                self._edit_bias[join.slot, : len(edits)] = self._upload(bias, torch.float32)
            if needs.penalties:
                if self._history is None:
                    self._history = _History(len(self._needs), self.vocab_size, self.device)
                prompt_ids = self._upload(join.prompt_token_ids, torch.int64)
                output_ids = self._upload(join.output_token_ids, torch.int64)
                self._history.rebuild(join.slot, prompt_ids, output_ids)
        slots = self._upload([join.slot for join in joins], torch.int64)
        self._floats.index_copy_(0, slots, self._upload(floats, torch.float32))
        self._integers.index_copy_(0, slots, self._upload(integers, torch.int64))

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        slots_host: Sequence[int],
        output_index: Tensor,
        allowed: Tensor | None = None,
    ) -> SampledRows:
        """Draws one token a row and counts it in its slot's history.

        `logits` [rows, vocab] float32 are the raw ones and stay as they are; `slots` [rows] int64
        (and on the host `slots_host`) whose rows they are; `output_index` [rows] int64 how many
        output tokens came before; `allowed` [rows, vocab] bool, if given, which tokens may come.
        Padded rows, of a slot that nobody joins, may follow those of `slots_host`.
        """
        token_ids = self.perturbed(logits, slots, slots_host, output_index, allowed).argmax(dim=-1)
        needs = self._batch_needs(slots_host)
        if needs.penalties and self._history is not None:
            self._history.count(slots, token_ids)
        if needs.num_logprobs < 0:
            return SampledRows(token_ids, None, ())
        asked = (self._needs[slot].num_logprobs for slot in slots_host)
        return SampledRows(
            token_ids,
            top_logprobs(logits, token_ids, needs.num_logprobs),
            tuple(None if num < 0 else num for num in asked),
        )

    def perturbed(
        self,
        logits: Tensor,
        slots: Tensor,
        slots_host: Sequence[int],
        output_index: Tensor,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """[rows, vocab] float32, of which `sample` takes the argmax. Changes nothing.

        With `kernels.sampling.margin` a test sees how close the decision was.
        """
        needs = self._batch_needs(slots_host)
        if needs == _Needs(num_logprobs=needs.num_logprobs) and allowed is None:
            return logits
        temperature, top_p, min_p, *penalties = self._floats[slots].unbind(dim=1)
        seed, top_k, min_tokens, num_edits, _ = self._integers[slots].unbind(dim=1)
        if needs.num_edits:
            columns = torch.arange(needs.num_edits, device=self.device)
            bias = self._edit_bias[slots, : needs.num_edits]
            over = bias.isneginf() & (output_index >= min_tokens)[:, None]
            bias = bias.masked_fill(over | (columns >= num_edits[:, None]), 0.0)
            logits = add_bias(logits, self._edit_ids[slots, : needs.num_edits], bias)
        if needs.penalties and self._history is not None:
            seen, counts = self._history.prompt_seen[slots], self._history.output_counts[slots]
            logits = penalize(logits, seen, counts, *penalties)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if not needs.random:
            return logits
        rows = SamplingRows(
            temperature=temperature,
            seed=seed,
            output_index=output_index,
            min_p=min_p if needs.min_p else None,
            top_k=top_k if needs.top_k else None,
            top_p=top_p if needs.top_p else None,
        )
        return perturb(logits, rows)

    def _batch_needs(self, slots_host: Sequence[int]) -> _Needs:
        distinct = {self._needs[slot] for slot in slots_host}
        return _Needs(*map(max, zip(*distinct, strict=True)))

    def _edits(self, join: SlotJoin) -> list[tuple[int, float]]:
        """(token id, what to add to its logit). An id beyond the vocabulary cannot be sampled
        anyway, and would be an out-of-bounds access on the device."""
        edits = list(join.params.logit_bias.items())
        if join.params.min_tokens:
            edits += [(token_id, -torch.inf) for token_id in sorted(join.stop_token_ids)]
        return [edit for edit in edits if edit[0] < self.vocab_size]

    def _upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """A device tensor of `values`, without waiting for the device.

        The pinned source is a fresh one each time. torch's host allocator does not hand its memory
        out again before the copy is over, so that nothing overwrites it while it is read.
        """
        pinned = self.device.type == "cuda"
        source = torch.tensor(values, dtype=dtype, pin_memory=pinned)
        return source.to(self.device, non_blocking=True)
