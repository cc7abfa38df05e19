"""Samples the tokens of a step, and keeps the sampling state of all slots on one device.

All work is queued without waiting for the device. On a GPU, Triton kernels sample any mix of
requests and read the parameters of each row from device tables; elsewhere the torch reference
computes the features that the batch needs, as known to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.device.lanes import pack
from minisgl.distributed.communicator import SINGLE_RANK, Communicator
from minisgl.kernels.dispatch import runs_triton
from minisgl.kernels.sampling.order import ids_of as token_ids_of
from minisgl.kernels.sampling.order import order_keys
from minisgl.kernels.sampling.reference import (
    SamplingRows,
    TokenScores,
    add_bias,
    filtered,
    mask_tokens,
    penalize,
    perturb,
    top_logprobs,
)
from minisgl.kernels.sampling.tables import (
    RECORD_WORDS,
    SamplingTables,
    bias_of,
    column_of,
    ids_of,
    masked_of,
    pack_edits,
    pack_record,
)
from minisgl.runner.sampled_rows import SampledRows
from minisgl.runner.sampling_features import RAW_SCORES, SamplingFeatures, Scoring
from minisgl.scheduler.plan import SlotJoin
from minisgl.shards import vocab_shard

if TYPE_CHECKING:  # imports Triton, which may not be installed
    from minisgl.kernels.sampling.launch import TritonSampling

# Number of rows that the kernels process at a time: a typical maximum batch plus padding.
BLOCK_ROWS = 320
PADDED_ROWS = 64


@lru_cache
def _shared(features: SamplingFeatures) -> SamplingFeatures:
    """Intern `features` (cached), so that a batch has few distinct objects."""
    return features


class Sampler:
    """Owns the sampling tables of `num_slots` slots and of the scratch slot of padded rows, which
    is greedy and never joined. All calls come from one thread at a time, and one stream.

    `join` assigns a slot to a request and overwrites the state of the previous one; `sample` draws
    a token for each row of a step and adds it to the history of the slot.

    With tensor parallelism each rank has the logits of its shard of the vocabulary. Every rank
    computes the token from the same numbers, so tokens are never exchanged:

    - Without filters, the token is the argmax of logit plus Gumbel noise. Each rank finds the
      maximum of its shard, and an all-reduce (max) of 8 bytes per row yields the token,
      independent of the order of reduction.
    - Filters, penalties and logprobs need the whole row. An all-gather gives every rank the same
      bits, and the kernels are deterministic. (The number of kept tokens is
      bounded by top_k only, and a top-k of each shard would take longer than the all-gather: 40 MB
      for 256 rows of 150,000 logits on two ranks, about 0.1 ms.)
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        backend: Literal["triton", "torch"] | None = None,
        ranks: Communicator = SINGLE_RANK,
        samples: bool = True,
        scoring: Scoring = RAW_SCORES,
    ) -> None:
        """backend: by default Triton on a GPU, torch elsewhere. samples: False for a rank that only
        needs the features of the slots, and calls neither `sample` nor `mask`."""
        self.vocab_size = vocab_size
        self._ranks = ranks
        self._vocab = vocab_shard(vocab_size, ranks.rank, ranks.size)
        self.device = device
        self.tables = SamplingTables(num_slots + 1, vocab_size, device)
        self._features = [SamplingFeatures()] * (num_slots + 1)
        # The slots that were masked last, on the host and on the device.
        self._masked_slots: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))
        self._triton: TritonSampling | None = None
        if backend is None:
            backend = "triton" if runs_triton(device) else "torch"
        self._samples = samples
        self._scoring = scoring
        if backend == "triton" and samples:
            from minisgl.kernels.sampling.launch import SampleWorkspace, TritonSampling

            num_rows = min(num_slots + PADDED_ROWS, BLOCK_ROWS)
            workspace = SampleWorkspace(num_rows, vocab_size, device)
            self._triton = TritonSampling(
                self.tables, workspace, num_top=scoring.most, processed=scoring.processed
            )

    @property
    def num_prompt_tokens(self) -> Tensor:
        """[num_slots + 1] int64, a view. The position of a token minus this is its output index."""
        return column_of(self.tables.records, "num_prompt_tokens")

    def join(self, joins: Sequence[SlotJoin]) -> None:
        """Queue the assignment of slots to requests. A slot may occur at most once."""
        if not joins:
            return
        records: list[bytes] = []
        parts: list[NDArray[np.int64]] = []
        for join in joins:
            edits = self._edits(join)
            features = self._features[join.slot] = _shared(
                SamplingFeatures.of(join.params, len(edits), masked=join.masked)
            )
            if not self._samples:
                continue
            records.append(
                pack_record(
                    join.params,
                    seed=join.seed,
                    num_edits=len(edits),
                    num_prompt_tokens=len(join.prompt_token_ids),
                    masked=join.masked,
                )
            )
            if edits:
                parts.append(pack_edits(edits))
            if features.penalties:
                prompt = np.array(join.prompt_token_ids, dtype=np.int64)
                parts.append(prompt[prompt >= 0])  # the others are of images
                parts.append(np.array(join.output_token_ids, dtype=np.int64))
        if not self._samples:
            return
        numbers = np.array([join.slot for join in joins], dtype=np.int64)
        packed_records = np.frombuffer(b"".join(records), dtype=np.int64)
        slots, new_records, *rest = self._upload([numbers, packed_records, *parts])
        self.tables.records.index_copy_(0, slots, new_records.view(-1, RECORD_WORDS))
        uploaded = iter(rest)
        for join in joins:
            features = self._features[join.slot]
            if features.num_edits:
                self.tables.edits[join.slot, : features.num_edits] = next(uploaded)
            if features.penalties:
                self._rebuild_history(join.slot, next(uploaded), next(uploaded))

    def mask(self, slots_host: tuple[int, ...], masks: Tensor) -> None:
        """Queue the masks of the next tokens of these slots: rows of MaskRows, as int32."""
        if slots_host != self._masked_slots[0]:
            (slots,) = self._upload([np.array(slots_host, dtype=np.int64)])
            self._masked_slots = slots_host, slots
        self.tables.masks.index_copy_(0, self._masked_slots[1], masks)

    def features(self, slots_host: Sequence[int]) -> SamplingFeatures:
        """The union of the features of these slots; it changes when a slot is joined."""
        distinct = {id(used): used for used in map(self._features.__getitem__, slots_host)}
        return reduce(or_, distinct.values(), SamplingFeatures())

    def logprobs_wanted(self, slots_host: Sequence[int]) -> list[int | None]:
        """The number of top logprobs that each slot's request wants; None for no logprobs."""
        asked = (self._features[slot].num_logprobs for slot in slots_host)
        return [None if num < 0 else num for num in asked]

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        features: SamplingFeatures,
    ) -> SampledRows:
        """Draw one token for each row and count it in its slot's history.

        logits: [rows, vocab], any float dtype, raw and left unchanged; with tensor parallelism
        [rows, shard], this rank's shard with its padding. slots: [rows] int64 or int32; the scratch
        slot may occur repeatedly. output_index: [rows] int64, the number of output tokens before
        the one to draw. features: at least those of the batch.

        May be captured. The graph then serves any batch with these features; with Triton, any batch
        for which `features.full`, `features.masked` and the presence of top_p are the same.
        """
        assert slots.is_contiguous() and output_index.is_contiguous(), "kernels take no strides"
        if self._ranks.size > 1:
            if not (features.filters or features.full):
                return SampledRows(self._sample_shard(logits, slots, output_index, features), None)
            logits = self._ranks.all_gather(logits)[:, : self.vocab_size]
        if self._triton is None:
            token_ids = self.perturbed(logits, slots, output_index, features).argmax(dim=-1)
            scores = None
            if features.num_logprobs >= 0:
                scores = self.score(logits, slots, output_index, features, token_ids)
            counts = self.tables.output_counts
            if features.penalties and counts is not None:
                ones = torch.ones_like(token_ids, dtype=torch.int32)
                counts.index_put_((slots.long(), token_ids), ones, accumulate=True)
        else:
            rows = logits, slots, output_index
            top_p, masked = "top_p" in features.filters, features.masked
            if not features.full:
                sampled = self._triton.sample(*rows, top_p=top_p, masked=masked)
                return SampledRows(sampled, None)
            token_ids, scores = self._triton.sample_full(*rows, top_p=top_p, masked=masked)
        return SampledRows(token_ids, scores)

    def score(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        features: SamplingFeatures,
        token_ids: Tensor,
    ) -> TokenScores:
        """The scores of sampled tokens that are not counted yet, by the torch reference."""
        num_top = min(features.num_logprobs, self._scoring.most)
        if not self._scoring.processed:
            return top_logprobs(logits.float(), token_ids, num_top)
        edited = self._edited(logits, slots, output_index, features)
        drawn = filtered(edited, self._sampling_rows(slots, output_index, features))
        return top_logprobs(edited, token_ids, num_top, drawn)

    def _sample_shard(
        self, logits: Tensor, slots: Tensor, output_index: Tensor, features: SamplingFeatures
    ) -> Tensor:
        """Sample rows without filters from this rank's shard of the logits; [rows] int64."""
        logits, first_id = logits[:, : self._vocab.num_real], self._vocab.first
        if self._triton is not None:
            rows = logits, slots, output_index
            return self._triton.sample_part(
                *rows,
                first_id=first_id,
                all_reduce_max=self._ranks.all_reduce_max,
                masked=features.masked,
            )
        perturbed = self.perturbed(logits, slots, output_index, features, first_id)
        best = order_keys(perturbed, first_id).amax(dim=-1, keepdim=True)
        return token_ids_of(self._ranks.all_reduce_max(best))

    def perturbed(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        features: SamplingFeatures,
        first_id: int = 0,
    ) -> Tensor:
        """Compute the values of which the torch reference takes the argmax: [rows, vocab] float32.

        Takes the arguments of `sample` and changes none. first_id: of the first column. A test can
        pass the result to `kernels.sampling.reference.margin` to see how close the decision was.
        """
        edited = self._edited(logits, slots, output_index, features, first_id)
        if not features.random:
            return edited
        return perturb(edited, self._sampling_rows(slots, output_index, features), first_id)

    def _edited(
        self,
        logits: Tensor,
        slots: Tensor,
        output_index: Tensor,
        features: SamplingFeatures,
        first_id: int = 0,
    ) -> Tensor:
        """The logits after bias, penalties and masks, as float32."""
        logits = logits.float()
        if not (features.num_edits or features.penalties or features.masked):
            return logits
        slots = slots.long()
        records = self.tables.records[slots]
        if features.num_edits:
            columns = torch.arange(features.num_edits, device=self.device)
            edits = self.tables.edits[slots, : features.num_edits]
            bias = bias_of(edits)
            over = bias.isneginf() & (output_index >= column_of(records, "min_tokens"))[:, None]
            unused = columns >= column_of(records, "num_edits")[:, None]
            bias = bias.masked_fill(over | unused, 0.0)
            logits = add_bias(logits, ids_of(edits), bias)
        seen, counts = self.tables.prompt_seen, self.tables.output_counts
        if features.penalties and seen is not None and counts is not None:
            logits = penalize(
                logits,
                seen[slots],
                counts[slots],
                repetition=column_of(records, "repetition_penalty"),
                frequency=column_of(records, "frequency_penalty"),
                presence=column_of(records, "presence_penalty"),
            )
        if features.masked:
            words = self.tables.masks[slots].masked_fill(~masked_of(records)[:, None], -1)
            logits = mask_tokens(logits, words, first_id)
        return logits

    def _sampling_rows(
        self, slots: Tensor, output_index: Tensor, features: SamplingFeatures
    ) -> SamplingRows:
        records = self.tables.records[slots.long()]
        return SamplingRows(
            temperature=column_of(records, "temperature"),
            seed=column_of(records, "seed"),
            output_index=output_index,
            filters={name: column_of(records, name) for name in features.filters},
        )

    def _rebuild_history(self, slot: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        self.tables.allocate_history()
        seen, counts = self.tables.prompt_seen, self.tables.output_counts
        assert seen is not None and counts is not None
        seen[slot].zero_().index_fill_(0, prompt_ids, True)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        counts[slot].zero_().index_add_(0, output_ids, ones)

    def _edits(self, join: SlotJoin) -> list[tuple[int, float]]:
        """The (token id, bias) pairs of a request: its logit_bias, and -inf for stop tokens, which
        the kernels ignore once min_tokens is reached. Ids outside the vocabulary are dropped: they
        cannot be sampled, and would cause out-of-bounds accesses on the device."""
        edits = list(join.params.logit_bias.items())
        if join.params.min_tokens and not join.masked:  # or else the masks see to it
            edits += [(token_id, -torch.inf) for token_id in sorted(join.stop_token_ids)]
        return [edit for edit in edits if edit[0] < self.vocab_size]

    def _upload(self, parts: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """Upload `parts` in one asynchronous copy."""
        source, sizes = pack(parts, pinned=self.device.type == "cuda")
        uploaded: tuple[Tensor, ...] = source.to(self.device, non_blocking=True).split(sizes)
        return uploaded
