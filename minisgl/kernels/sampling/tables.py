"""The sampling parameters of each slot on the device, as the torch reference and the Triton kernels
read them.

A slot's parameters are one record of a few words, and an edit of its logits is one word of 8 bytes,
so that a join writes each table once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.matcher import mask_words
from minisgl.request import MAX_EDITS, PARAMETERS, SAMPLED, SamplingParams


def _columns(kind: type[int] | type[float]) -> dict[str, int]:
    return {
        parameter.name: parameter.column
        for parameter in PARAMETERS.values()
        if parameter.kind is kind and parameter.column is not None
    }


# The columns of a record by their numbers; the parameters of requests declare theirs.
INTEGERS = {"seed": 0, "num_edits": 3, "num_prompt_tokens": 4, **_columns(int)}
FLOATS = _columns(float)
# A record, in words of 8 bytes: the integers as int64, the floats as float32, two to a word, and
# the int32 num_logprobs and masked in the last word.
FIRST_FLOAT_WORD = len(INTEGERS)
NUM_LOGPROBS_WORD = FIRST_FLOAT_WORD + (len(FLOATS) + 1) // 2
RECORD_WORDS = NUM_LOGPROBS_WORD + 1
_RECORD = struct.Struct(f"<{len(INTEGERS)}q{len(FLOATS)}f{len(FLOATS) % 2 * 4}x2i")
_IN_ORDER = (*sorted(INTEGERS, key=INTEGERS.__getitem__), *sorted(FLOATS, key=FLOATS.__getitem__))


def pack_record(
    params: SamplingParams,
    *,
    seed: int,
    num_edits: int,
    num_prompt_tokens: int,
    masked: bool = False,
) -> bytes:
    """temperature 0: greedy; num_logprobs -1: none, 0: of the sampled token only."""
    values: dict[str, float] = {
        parameter.name: parameter.stored(getattr(params, parameter.name)) for parameter in SAMPLED
    }
    values |= {"seed": seed, "num_edits": num_edits, "num_prompt_tokens": num_prompt_tokens}
    if params.greedy:
        values["temperature"] = 0.0
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    return _RECORD.pack(*(values[name] for name in _IN_ORDER), num_logprobs, masked)


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


def column_of(records: Tensor, name: str) -> Tensor:
    """[...] int64 or float32: a column of INTEGERS or FLOATS."""
    if name in INTEGERS:
        return records[..., INTEGERS[name]]
    return records.view(torch.float32)[..., 2 * FIRST_FLOAT_WORD + FLOATS[name]]


def masked_of(records: Tensor) -> Tensor:
    """[...] bool"""
    return records.view(torch.int32)[..., 2 * NUM_LOGPROBS_WORD + 1] != 0


def ids_of(edits: Tensor) -> Tensor:
    """int64"""
    return edits & 0xFFFFFFFF


def bias_of(edits: Tensor) -> Tensor:
    """float32"""
    return (edits >> 32).to(torch.int32).view(torch.float32)
