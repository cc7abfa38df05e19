"""The sampling parameters of each slot on the device, as the torch reference and the Triton kernels
read them.

A slot's parameters are one record of 72 bytes, and an edit of its logits is one word of 8 bytes, so
that a join writes each table once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.matcher import mask_words
from minisgl.request import MAX_EDITS, SamplingParams

# A record, in words of 8 bytes: five int64 (SEED to NUM_PROMPT_TOKENS), six float32, two to a word
# (TEMPERATURE to PRESENCE), and the int32 num_logprobs and masked in the last word.
RECORD = struct.Struct("<5q6f2i")
RECORD_WORDS = RECORD.size // 8
SEED, TOP_K, MIN_TOKENS, NUM_EDITS, NUM_PROMPT_TOKENS = range(5)
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
FIRST_FLOAT_WORD, NUM_LOGPROBS_WORD = 5, 8


def pack_record(
    params: SamplingParams,
    *,
    seed: int,
    num_edits: int,
    num_prompt_tokens: int,
    masked: bool = False,
) -> bytes:
    """top_k 0: off; temperature 0: greedy; num_logprobs -1: none, 0: of the sampled token only."""
    return RECORD.pack(
        seed,
        max(params.top_k, 0),
        params.min_tokens,
        num_edits,
        num_prompt_tokens,
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        -1 if params.logprobs is None else params.logprobs,
        masked,
    )


def pack_edits(edits: Sequence[tuple[int, float]]) -> NDArray[np.int64]:
    """Packs (token id, bias of its logit) into one word each: [len(edits)] int64."""
    pairs = np.array(edits, dtype=[("id", "<i4"), ("bias", "<f4")])
    return pairs.view(np.int64)


class SamplingTables:
    """The tables, by slot and contiguous. Initially every slot is greedy, with neutral
    parameters."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        neutral = pack_record(
            SamplingParams(temperature=0), seed=0, num_edits=0, num_prompt_tokens=0
        )
        record = torch.frombuffer(bytearray(neutral), dtype=torch.int64)
        self.records = record.repeat(num_slots, 1).to(device)  # [slots, RECORD_WORDS] int64
        # [slots, MAX_EDITS] int64: a token id in the lower half, in the upper one the bits of the
        # float32 that is added to its logit. The first num_edits of a slot count.
        self.edits = torch.zeros((num_slots, MAX_EDITS), dtype=torch.int64, device=device)
        # [slots, words] int32, rows as of MaskRows: the tokens allowed to slots whose records say
        # masked, written before each of them is sampled. Rows of other slots are undefined.
        words = mask_words(vocab_size)
        self.masks = torch.zeros((num_slots, words), dtype=torch.int32, device=device)
        # The tokens of requests with penalties. Rows of other slots are undefined; neutral
        # penalties ignore them.
        self.prompt_seen: Tensor | None = None  # [slots, vocab] bool
        self.output_counts: Tensor | None = None  # [slots, vocab] int32

    def allocate_history(self) -> None:
        """Allocates prompt_seen and output_counts, 5 bytes a slot and id, at the first call."""
        if self.prompt_seen is None:
            shape, device = (self.num_slots, self.vocab_size), self.records.device
            self.prompt_seen = torch.zeros(shape, dtype=torch.bool, device=device)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=device)


# The fields of records and edits in torch, as views if possible


def integers_of(records: Tensor) -> Tensor:
    """[..., 5] int64, from SEED to NUM_PROMPT_TOKENS."""
    return records[..., :FIRST_FLOAT_WORD]


def floats_of(records: Tensor) -> Tensor:
    """[..., 6] float32, from TEMPERATURE to PRESENCE."""
    return records.view(torch.float32)[..., 2 * FIRST_FLOAT_WORD : 2 * NUM_LOGPROBS_WORD]


def masked_of(records: Tensor) -> Tensor:
    """[...] bool"""
    return records.view(torch.int32)[..., 2 * NUM_LOGPROBS_WORD + 1] != 0


def ids_of(edits: Tensor) -> Tensor:
    """int64"""
    return edits & 0xFFFFFFFF


def bias_of(edits: Tensor) -> Tensor:
    """float32"""
    return (edits >> 32).to(torch.int32).view(torch.float32)
