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
SEED = tl.constexpr(tables.INTEGERS["seed"])
MIN_TOKENS = tl.constexpr(tables.INTEGERS["min_tokens"])
NUM_EDITS = tl.constexpr(tables.INTEGERS["num_edits"])
REPETITION = tl.constexpr(tables.FLOATS["repetition_penalty"])
FREQUENCY = tl.constexpr(tables.FLOATS["frequency_penalty"])
PRESENCE = tl.constexpr(tables.FLOATS["presence_penalty"])


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
def is_masked(records, slot):
    return (tl.load(records + slot * _WORDS + _NUM_LOGPROBS_WORD) >> 32) != 0


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
def source_of(
    logits,
    edited,
    records,
    masks,
    mask_stride,
    row,
    slot,
    stride,
    vocab_size,
    first_id,
    full: tl.constexpr,
):
    """The source of a row's logits: (raw, edited, number of ids to read of each, vocabulary size)
    and, where there are masks, (mask, number of ids that it is for: all or none, first id)."""
    num_edited = 0
    if full:
        num_edited = tl.where(is_edited(records, slot, vocab_size), vocab_size, 0)
    edited += row * vocab_size
    if masks is None:
        return logits + row * stride, edited, vocab_size - num_edited, num_edited, vocab_size
    else:
        raw = logits + row * stride
        mask = masks + slot * mask_stride
        num_raw = vocab_size - num_edited
        num_masked = tl.where(is_masked(records, slot), vocab_size, 0)
        return raw, edited, num_raw, num_edited, vocab_size, mask, num_masked, first_id


@triton.jit
def load_logits(source, ids, mask, full: tl.constexpr):
    """float32 logits of a row, -inf where not `mask` or not allowed; a masked load costs no bytes.

    `ids`: [quads, 4] as by `ids_of`, or one.
    """
    logits, edited, num_raw, num_edited = source[0], source[1], source[2], source[3]
    if len(source) > 5:
        mask = mask & _allowed(source[5], ids, source[6], source[7])
    if full:
        raw = tl.load(logits + ids, mask=mask & (ids < num_raw), other=-float("inf"))
        new = tl.load(edited + ids, mask=mask & (ids < num_edited), other=-float("inf"))
        return tl.maximum(raw.to(tl.float32), new)
    else:
        return tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def _allowed(masks, ids, num_masked, first_id):
    """Whether the mask has the bits of `ids`; ids from `num_masked` on are allowed."""
    if len(ids.shape) == 2:
        quads = tl.min(ids, axis=1)  # the four bits of a quad are in one word
        bits = (quads + first_id) % 32
        words = tl.load(masks + (quads + first_id) // 32, mask=quads < num_masked, other=-1)
        return ((words[:, None] >> (bits[:, None] + tl.arange(0, 4)[None, :])) & 1) != 0
    else:
        word = tl.load(masks + (ids + first_id) // 32, mask=ids < num_masked, other=-1)
        return ((word >> ((ids + first_id) % 32)) & 1) != 0


@triton.jit
def ids_of(quads):
    """[quads, 4]"""
    return quads[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def segment_maxima(x):
    """The maximum of each SEGMENT of ids, from [quads, 4]."""
    return tl.max(tl.reshape(x, [x.shape[0] // SEGMENT_QUADS, SEGMENT]), axis=1)
