"""Loading a row in the sampling kernels: the record of its slot, and its logits."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.sampling import tables

SEGMENT = tl.constexpr(64)  # ids that share a maximum
SEGMENT_QUADS = tl.constexpr(16)  # four ids are a quad, which shares one call of Philox
_WORDS = tl.constexpr(tables.RECORD_WORDS)
_FIRST_FLOAT_WORD = tl.constexpr(tables.FIRST_FLOAT_WORD)
_NUM_LOGPROBS_WORD = tl.constexpr(tables.NUM_LOGPROBS_WORD)
SEED = tl.constexpr(tables.SEED)
TOP_K = tl.constexpr(tables.TOP_K)
MIN_TOKENS = tl.constexpr(tables.MIN_TOKENS)
NUM_EDITS = tl.constexpr(tables.NUM_EDITS)
TEMPERATURE = tl.constexpr(tables.TEMPERATURE)
TOP_P = tl.constexpr(tables.TOP_P)
MIN_P = tl.constexpr(tables.MIN_P)
REPETITION = tl.constexpr(tables.REPETITION)
FREQUENCY = tl.constexpr(tables.FREQUENCY)
PRESENCE = tl.constexpr(tables.PRESENCE)


@triton.jit
def float_of(half_word):
    return half_word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_integer(records, slot, field: tl.constexpr):
    return tl.load(records + slot * _WORDS + field)


@triton.jit
def load_float(records, slot, field: tl.constexpr):
    word = tl.load(records + slot * _WORDS + _FIRST_FLOAT_WORD + field // 2)
    return float_of(word >> (32 * (field % 2)))


@triton.jit
def load_num_logprobs(records, slot):
    return tl.load(records + slot * _WORDS + _NUM_LOGPROBS_WORD).to(tl.int32)


@triton.jit
def load_filters(records, slot, vocab_size):
    """(temperature, top_p, min_p, top_k, by_top_k, by_top_p, filtered).

    by_top_k: top_k is on, which is decided from the segment maxima alone; by_top_p: top_p is on;
    filtered: any filter is on.
    """
    temperature = load_float(records, slot, TEMPERATURE)
    top_p = load_float(records, slot, TOP_P)
    min_p = load_float(records, slot, MIN_P)
    top_k = load_integer(records, slot, TOP_K)
    random = temperature > 0
    by_top_k = random & (top_k > 0) & (top_k < vocab_size)
    by_top_p = random & (top_p < 1)
    filtered = by_top_k | by_top_p | (random & (min_p > 0))
    return temperature, top_p, min_p, top_k, by_top_k, by_top_p, filtered


@triton.jit
def load_penalties(records, slot, vocab_size):
    """(number of ids with penalties: all or none, repetition, frequency, presence)"""
    repetition = load_float(records, slot, REPETITION)
    frequency = load_float(records, slot, FREQUENCY)
    presence = load_float(records, slot, PRESENCE)
    any = (repetition != 1) | (frequency != 0) | (presence != 0)
    return tl.where(any, vocab_size, 0), repetition, frequency, presence


@triton.jit
def is_edited(records, slot, vocab_size):
    num_penalized = load_penalties(records, slot, vocab_size)[0]
    return (num_penalized > 0) | (load_integer(records, slot, NUM_EDITS) > 0)


@triton.jit
def source_of(logits, edited, records, row, slot, stride, vocab_size, full: tl.constexpr):
    """The source of a row's logits: (raw, edited, number of ids to read of each, vocabulary
    size)."""
    num_edited = 0
    if full:
        num_edited = tl.where(is_edited(records, slot, vocab_size), vocab_size, 0)
    edited += row * vocab_size
    return logits + row * stride, edited, vocab_size - num_edited, num_edited, vocab_size


@triton.jit
def load_logits(source, ids, mask, full: tl.constexpr):
    """float32 logits of a row, -inf where not `mask`; a masked load costs no bytes."""
    logits, edited, num_raw, num_edited, _ = source
    if full:
        raw = tl.load(logits + ids, mask=mask & (ids < num_raw), other=-float("inf"))
        new = tl.load(edited + ids, mask=mask & (ids < num_edited), other=-float("inf"))
        return tl.maximum(raw.to(tl.float32), new)
    else:
        return tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def ids_of(quads):
    """[quads, 4]"""
    return quads[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def segment_maxima(x):
    """The maximum of each SEGMENT of ids, from [quads, 4]."""
    return tl.max(tl.reshape(x, [x.shape[0] // SEGMENT_QUADS, SEGMENT]), axis=1)
