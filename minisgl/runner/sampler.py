"""The sampling state of the slots on one device, and the choice of the tokens of a step.

Everything here is queued on the device without waiting. On a GPU Triton kernels sample any mix of
requests, and read from the device's tables what each row needs; elsewhere the torch reference does
the work that the batch needs, which the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.sampling.order import ids_of as token_ids_of
from minisgl.kernels.sampling.order import order_keys
from minisgl.kernels.sampling.reference import (
    SamplingRows,
    TokenScores,
    add_bias,
    penalize,
    perturb,
    top_logprobs,
)
from minisgl.kernels.sampling.tables import (
    NUM_PROMPT_TOKENS,
    RECORD_WORDS,
    SamplingTables,
    bias_of,
    floats_of,
    ids_of,
    integers_of,
    pack_edits,
    pack_record,
)
from minisgl.request import SamplingParams, TokenLogprobs
from minisgl.runner.lanes import pack
from minisgl.scheduler.plan import SlotJoin
from minisgl.shards import vocab_shard

if TYPE_CHECKING:  # imports Triton, which may be missing
    from minisgl.kernels.sampling.launch import TritonSampling

# Rows that the kernels work on at a time: the slots of a usual batch and room for padded ones.
BLOCK_ROWS = 320
PADDED_ROWS = 64


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of a step, on the device that sampled them."""

    token_ids: Tensor  # [rows] int64
    # As many rivals a row as the row that asked for most, or more; beyond what a row asked for they
    # are undefined. None if no row asked, unless the work was done anyway.
    scores: TokenScores | None


def list_logprobs(
    token_ids: Sequence[int], scores: TokenScores, num_logprobs: Sequence[int | None]
) -> dict[int, TokenLogprobs]:
    """What the caller gets, by row, of the rows that asked. `scores` must have reached the host.

    Serves sampled tokens and, with `top_logprobs` of their logits, those of a prompt.
    """
    asked = [(row, num) for row, num in enumerate(num_logprobs) if num is not None]
    rows = [row for row, _ in asked]
    logprob = scores.logprob[rows].tolist()
    top_ids, top = scores.top_ids[rows].tolist(), scores.top_logprobs[rows].tolist()
    return {
        row: TokenLogprobs(
            token_ids[row],
            logprob[place],
            tuple(zip(top_ids[place][:num], top[place][:num], strict=True)),
        )
        for place, (row, num) in enumerate(asked)
    }


class Needs(NamedTuple):
    """The work that a request asks for. A batch needs the maximum of its rows, field by field."""

    random: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    penalties: bool = False
    num_edits: int = 0
    num_logprobs: int = -1  # -1: none, 0: of the sampled token only

    @classmethod
    def of(cls, params: SamplingParams, num_edits: int) -> Needs:
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

    @property
    def filters(self) -> bool:
        return self.min_p or self.top_k or self.top_p

    @property
    def full(self) -> bool:
        """Whether it takes the full variant of the kernels; the plain one does all else."""
        return self.penalties or self.num_edits > 0 or self.num_logprobs >= 0


@lru_cache
def _shared(needs: Needs) -> Needs:
    """The same object for equal needs, mostly, so that a batch has few to look at."""
    return needs


class Sampler:
    """Owns the sampling tables of `num_slots` slots, and of one more, the scratch slot of padded
    rows, which is greedy and nobody joins. All calls come from one thread and one stream.

    `join` gives a slot to a request, overwriting all that the last one left that still counts;
    `sample` draws a token for each row of a step and adds it to its slot's history.

    Of several ranks each has the logits of its part of the vocabulary. All come to the same token
    without asking which, because each computes it from the same numbers:

    - Without filters a token is the largest sum of logit and noise. Each rank finds its own best,
      and the largest of these, 8 bytes a row and rank, is the token: a maximum knows no order.
    - Filters, penalties and logprobs need the whole row. It is gathered, so that every rank has the
      same bits, and then runs the same kernels on them, whose result depends on nothing else. (The
      kept tokens are bounded by top_k alone, and to find the k likeliest would take each rank
      longer than the gathering: 40 MB at 256 rows of 150,000 over two ranks, some 0.1 ms.)
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        backend: Literal["triton", "torch"] | None = None,
        ranks: Communicator = SINGLE_RANK,
    ) -> None:
        """`backend`: None: Triton where it runs."""
        self.vocab_size = vocab_size
        self._ranks = ranks
        self._vocab = vocab_shard(vocab_size, ranks.rank, ranks.size)
        self.device = device
        self.tables = SamplingTables(num_slots + 1, vocab_size, device)
        self._needs = [Needs()] * (num_slots + 1)
        self._triton: TritonSampling | None = None
        if backend is None:
            backend = "triton" if runs_triton(device) else "torch"
        if backend == "triton":
            from minisgl.kernels.sampling.launch import SampleWorkspace, TritonSampling

            num_rows = min(num_slots + PADDED_ROWS, BLOCK_ROWS)
            workspace = SampleWorkspace(num_rows, vocab_size, device)
            self._triton = TritonSampling(self.tables, workspace)

    @property
    def num_prompt_tokens(self) -> Tensor:
        """[num_slots + 1] int64, a view: a token's position minus this is its output index."""
        return integers_of(self.tables.records)[:, NUM_PROMPT_TOKENS]

    def allocate_history(self) -> None:
        """For penalties, 5 bytes for each token of the vocabulary and slot. The first `join` with
        penalties does it; it must precede the capture of a step that needs the full variant."""
        self.tables.allocate_history()

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Queues the writes that give each request its slot. A slot occurs at most once."""
        if not joins:
            return
        records: list[bytes] = []
        parts: list[NDArray[np.int64]] = []
        for join in joins:
            edits = self._edits(join)
            needs = self._needs[join.slot] = _shared(Needs.of(join.params, len(edits)))
            records.append(
                pack_record(
                    join.params,
                    seed=join.seed,
                    num_edits=len(edits),
                    num_prompt_tokens=len(join.prompt_token_ids),
                )
            )
            if edits:
                parts.append(pack_edits(edits))
            if needs.penalties:
                parts += (
                    np.array(ids, dtype=np.int64)
                    for ids in (join.prompt_token_ids, join.output_token_ids)
                )
        numbers = np.array([join.slot for join in joins], dtype=np.int64)
        packed_records = np.frombuffer(b"".join(records), dtype=np.int64)
        slots, new_records, *rest = self._upload([numbers, packed_records, *parts])
        self.tables.records.index_copy_(0, slots, new_records.view(-1, RECORD_WORDS))
        uploaded = iter(rest)
        for join in joins:
            needs = self._needs[join.slot]
            if needs.num_edits:
                self.tables.edits[join.slot, : needs.num_edits] = next(uploaded)
            if needs.penalties:
                self._rebuild_history(join.slot, next(uploaded), next(uploaded))

    def needs(self, slots_host: Sequence[int]) -> Needs:
        """Of a batch. It changes if a slot is joined."""
        distinct = {id(needs): needs for needs in map(self._needs.__getitem__, slots_host)}
        return Needs(*map(max, zip(*distinct.values(), strict=True)))

    def logprobs_wanted(self, slots_host: Sequence[int]) -> list[int | None]:
        """What `list_logprobs` wants to know of a batch."""
        asked = (self._needs[slot].num_logprobs for slot in slots_host)
        return [None if num < 0 else num for num in asked]

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        needs: Needs,
        allowed: Tensor | None = None,
    ) -> SampledRows:
        """Draws one token a row and counts it in its slot's history.

        `logits` [rows, vocab] of any float type are the raw ones and stay as they are, of several
        ranks [rows, size] this one's part with its padding; `slots`
        [rows] int64 or int32 whose rows they are, the scratch slot's any number of times;
        `output_index` [rows] int64 how many output tokens came before; `needs` those of the batch
        or more; `allowed` [rows, vocab] bool, if given, which tokens may come.

        May be captured, and then serves any batch with these needs; with Triton, any at all that is
        as `needs.full` says.
        """
        if self._ranks.size > 1:
            if not (needs.filters or needs.full) and allowed is None:
                return SampledRows(self._sample_part(logits, slots, output_index, needs), None)
            logits = self._ranks.all_gather(logits)[:, : self.vocab_size]
        if self._triton is None:
            token_ids = self.perturbed(logits, slots, output_index, needs, allowed).argmax(dim=-1)
            scores = None
            if needs.penalties:
                self._count(slots, token_ids)
        else:
            masked = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
            rows = masked, slots, output_index
            if not needs.full:
                return SampledRows(self._triton.sample(*rows, top_p=needs.top_p), None)
            token_ids, scores = self._triton.sample_full(*rows, top_p=needs.top_p)
        if needs.num_logprobs >= 0 and (scores is None or allowed is not None):
            scores = top_logprobs(logits.float(), token_ids, needs.num_logprobs)
        return SampledRows(token_ids, scores)

    def _sample_part(
        self, logits: Tensor, slots: Tensor, output_index: Tensor, needs: Needs
    ) -> Tensor:
        """The tokens of rows without filters, of which each rank has a part of the logits."""
        logits, first_id = logits[:, : self._vocab.num_real], self._vocab.first
        if self._triton is not None:
            rows = logits, slots, output_index
            return self._triton.sample_part(
                *rows, first_id=first_id, all_reduce_max=self._ranks.all_reduce_max
            )
        perturbed = self.perturbed(logits, slots, output_index, needs, first_id=first_id)
        best = order_keys(perturbed, first_id).amax(dim=-1, keepdim=True)
        return token_ids_of(self._ranks.all_reduce_max(best))

    def perturbed(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        needs: Needs,
        allowed: Tensor | None = None,
        first_id: int = 0,
    ) -> Tensor:
        """[rows, vocab] float32, of which the torch reference takes the argmax. Changes nothing.
        `first_id`: as for perturb.

        With `kernels.sampling.margin` a test sees how close the decision was.
        """
        logits = logits.float()
        if needs == Needs(num_logprobs=needs.num_logprobs) and allowed is None:
            return logits
        slots = slots.long()
        records = self.tables.records[slots]
        temperature, top_p, min_p, *penalties = floats_of(records).unbind(dim=1)
        seed, top_k, min_tokens, num_edits, _ = integers_of(records).unbind(dim=1)
        if needs.num_edits:
            columns = torch.arange(needs.num_edits, device=self.device)
            edits = self.tables.edits[slots, : needs.num_edits]
            bias = bias_of(edits)
            over = bias.isneginf() & (output_index >= min_tokens)[:, None]
            bias = bias.masked_fill(over | (columns >= num_edits[:, None]), 0.0)
            logits = add_bias(logits, ids_of(edits), bias)
        seen, counts = self.tables.prompt_seen, self.tables.output_counts
        if needs.penalties and seen is not None and counts is not None:
            logits = penalize(logits, seen[slots], counts[slots], *penalties)
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
        return perturb(logits, rows, first_id)

    def _rebuild_history(self, slot: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        self.tables.allocate_history()
        seen, counts = self.tables.prompt_seen, self.tables.output_counts
        assert seen is not None and counts is not None
        seen[slot].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        counts[slot].zero_().index_add_(0, output_ids, ones)

    def _count(self, slots: Tensor, token_ids: Tensor) -> None:
        counts = self.tables.output_counts
        if counts is not None:
            ones = torch.ones_like(token_ids, dtype=torch.int32)
            counts.index_put_((slots.long(), token_ids), ones, accumulate=True)

    def _edits(self, join: SlotJoin) -> list[tuple[int, float]]:
        """The request's logit_bias, and -inf for the tokens that end it, which is ignored from
        min_tokens on. An id beyond the vocabulary cannot be sampled anyway, and would be an
        out-of-bounds access on the device."""
        edits = list(join.params.logit_bias.items())
        if join.params.min_tokens:
            edits += [(token_id, -torch.inf) for token_id in sorted(join.stop_token_ids)]
        return [edit for edit in edits if edit[0] < self.vocab_size]

    def _upload(self, parts: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """`parts` on the device, in one copy, without waiting for it."""
        source, sizes = pack(parts, pinned=self.device.type == "cuda")
        uploaded: tuple[Tensor, ...] = source.to(self.device, non_blocking=True).split(sizes)
        return uploaded
