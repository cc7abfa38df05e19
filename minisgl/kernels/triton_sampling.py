"""Sampling inside a captured decode step: `kernels/sampling.py` in Triton, for any mix of requests.

Nothing here asks the host: the grid follows from the number of rows, what a row needs is read from
the tables of its slot. A token is the torch reference's on the same device; the notes say where
rounding may differ. Three ideas keep the logits, read once, nearly the only cost:

- A token's noise needs two logarithms, but only a large random word can win. So a tile bounds its
  scores from the words' float bits, and computes them only if the bound reaches the best so far
  (of n tiles, about ln n do).
- min_p, top_k and top_p each keep a prefix of one order: logit descending, then id ascending. So
  nothing is sorted. The winner among all tokens is the winner among the kept ones if it is kept
  itself, which the sum of the weights before it decides, and else the search goes on among the
  tokens before it. A draw from all survives top_p with probability top_p or more.
- The first pass leaves the maximum of every group of 64 ids behind. The k likeliest tokens lie in
  the k groups with the largest maxima (of equals the lower ids): if a group is left out, each of
  those k has a token that comes before all of its own. So top_k reads k groups again, not the row,
  and the 20 rivals of the logprobs read 20.

The bytes of a row of V logits of b bytes: bV greedy or with temperature only (256 rows of 151,936
in bf16: 78 MB, 18 µs at 4.27 TB/s, which noise exceeds: about 27 instructions an id, compiled for
sm_90, are 36 µs of issue slots). Any filter: V/16 more, for the maxima, written and read. With
top_k (alone or with the others) only 64bk on top, and noise for those ids only. top_p without
top_k: bV again, and for each refused draw up to twice that, read by one program; min_p alone: up to
bV if the draw is refused. The full variant adds for a row with edits or penalties bV + 5V read and
4V written, and reads 4V in place of bV; for one with logprobs bV.

Every sum that decides is of integers and every other reduction is a maximum, and the logprobs are
summed in tiles of a fixed size: a row gets the same alone and in any batch, bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.sampling import TokenScores

NUM_RIVALS = 20  # the most logprobs that a row may ask for

_TILE = 2048  # ids that a program works on at a time
_PROGRAMS = 1056  # about eight on each multiprocessor of an H200
_GROUP = tl.constexpr(64)  # ids that share a maximum
_GROUP_QUADS = tl.constexpr(16)  # ids come in fours, which share one call of Philox
_LIST_GROUPS = tl.constexpr(64)  # groups of a list that are worked on at a time
_LOWEST = tl.constexpr(-(2**63))  # below the rank of any token
_NUM_FLOATS = tl.constexpr(6)
_NUM_INTEGERS = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """The sampler's tables, by slot; all contiguous. The plain variant reads the first two only."""

    floats: Tensor  # [slots, 6] float32: temperature, top_p, min_p, repetition, frequency, presence
    integers: Tensor  # [slots, 5] int64: seed, top_k, min_tokens, num_edits, num_prompt_tokens
    edit_ids: Tensor | None = None  # [slots, MAX_EDITS] int64
    edit_bias: Tensor | None = None  # [slots, MAX_EDITS] float32
    prompt_seen: Tensor | None = None  # [slots, vocab] bool
    output_counts: Tensor | None = None  # [slots, vocab] int32
    num_logprobs: Tensor | None = None  # [slots] int32; -1: none, 0: of the sampled token only


class SampleWorkspace:
    """What the kernels of up to `num_rows` rows leave each other, for one stream.

    `full` adds what `sample_full` needs, mostly a row of float32 for each row of logits. `scores`
    are its results, overwritten by the next call.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, *, full: bool = False
    ) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_tiles = triton.cdiv(vocab_size, _TILE)
        self.num_groups = triton.cdiv(vocab_size, _GROUP.value)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        self.best = empty(self.num_tiles, dtype=torch.int64)
        self.sums = empty(self.num_tiles, 2, dtype=torch.int64)
        self.arrivals = empty(dtype=torch.int32).zero_()  # each call leaves it zero
        self.group_max = empty(self.num_groups, dtype=torch.float32)
        self.group_list = empty(self.num_groups, dtype=torch.int32)
        self.edited: Tensor | None = None
        self.raw_max: Tensor | None = None
        self.tile_sums: Tensor | None = None
        self.scores: TokenScores | None = None
        if full:
            self.edited = empty(vocab_size, dtype=torch.float32)
            self.raw_max = empty(self.num_groups, dtype=torch.float32)
            self.tile_sums = empty(self.num_tiles, 2, dtype=torch.float32)
            rivals = min(NUM_RIVALS, vocab_size)
            self.scores = TokenScores(
                logprob=empty(dtype=torch.float32),
                top_ids=empty(rivals, dtype=torch.int64),
                top_logprobs=empty(rivals, dtype=torch.float32),
            )


def sample(
    logits: Tensor,
    slots: Tensor,
    output_index: Tensor,
    tables: SamplingTables,
    workspace: SampleWorkspace,
    out_tokens: Tensor,
) -> None:
    """The plain variant: greedy, temperature, min_p, top_k, top_p and seed.

    Queues two kernels on the current stream, which may be capturing. `logits` [rows, vocab]
    float32, bfloat16 or float16, ids contiguous, stay as they are; `slots` and `output_index`
    [rows] int64 as for `Sampler.sample`. Writes `out_tokens` [rows] int64.
    """
    _draw(logits, None, slots, output_index, tables, workspace, out_tokens)


def sample_full(
    logits: Tensor,
    slots: Tensor,
    output_index: Tensor,
    tables: SamplingTables,
    workspace: SampleWorkspace,
    out_tokens: Tensor,
) -> TokenScores:
    """The full variant: edits and penalties too, and counts the tokens into the history.

    Needs every table, and a workspace with `full`. Returns the workspace's scores, of which a row's
    first `num_logprobs` rivals are written, and nothing of rows that want none. Four kernels.
    """
    edited, raw_max, tile_sums = workspace.edited, workspace.raw_max, workspace.tile_sums
    scores = workspace.scores
    assert edited is not None and scores is not None and tables.edit_ids is not None
    num_rows, vocab_size = logits.shape
    splits, tiles = _split(workspace, num_rows)
    _edit_kernel[(splits, num_rows)](
        logits,
        edited,
        slots,
        output_index,
        tables.floats,
        tables.integers,
        tables.edit_ids,
        tables.edit_bias,
        tables.prompt_seen,
        tables.output_counts,
        tables.num_logprobs,
        raw_max,
        tile_sums,
        vocab_size,
        logits.stride(0),
        tables.edit_ids.stride(0),
        workspace.num_groups,
        workspace.num_tiles,
        tiles,
        QUADS=_TILE // 4,
        EDITS=128,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _draw(logits, edited, slots, output_index, tables, workspace, out_tokens)
    _record_kernel[(num_rows,)](
        logits,
        slots,
        tables.floats,
        out_tokens,
        tables.output_counts,
        tables.num_logprobs,
        raw_max,
        tile_sums,
        workspace.group_list,
        scores.logprob,
        scores.top_ids,
        scores.top_logprobs,
        vocab_size,
        logits.stride(0),
        workspace.num_groups,
        workspace.num_tiles,
        min(NUM_RIVALS, vocab_size),
        GROUPS=triton.next_power_of_2(workspace.num_groups),
        TILES=triton.next_power_of_2(workspace.num_tiles),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return TokenScores(
        logprob=scores.logprob[:num_rows],
        top_ids=scores.top_ids[:num_rows],
        top_logprobs=scores.top_logprobs[:num_rows],
    )


def _draw(
    logits: Tensor,
    edited: Tensor | None,
    slots: Tensor,
    output_index: Tensor,
    tables: SamplingTables,
    workspace: SampleWorkspace,
    out_tokens: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size == workspace.vocab_size
    assert num_rows <= workspace.num_rows
    splits, tiles = _split(workspace, num_rows)
    inputs = (
        logits,
        logits if edited is None else edited,
        slots,
        output_index,
        tables.floats,
        tables.integers,
        workspace.best,
        workspace.group_max,
    )
    sizes = (
        vocab_size,
        logits.stride(0),
        workspace.num_groups,
        workspace.num_tiles,
        tiles,
    )
    _draw_kernel[(splits, num_rows)](
        *inputs,
        *sizes,
        FULL=edited is not None,
        QUADS=_TILE // 4,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _settle_kernel[(splits, num_rows)](
        *inputs,
        workspace.sums,
        workspace.arrivals,
        workspace.group_list,
        out_tokens,
        *sizes,
        splits,
        FULL=edited is not None,
        QUADS=_TILE // 4,
        GROUPS=triton.next_power_of_2(workspace.num_groups),
        TILES=triton.next_power_of_2(workspace.num_tiles),
        num_warps=8,
        maxnreg=128,  # or a multiprocessor would hold one program only
        enable_fp_fusion=False,
    )


def _split(workspace: SampleWorkspace, num_rows: int) -> tuple[int, int]:
    """(programs a row, tiles a program): enough to fill the device, and long enough to pay off."""
    tiles = triton.cdiv(workspace.num_tiles * num_rows, _PROGRAMS)
    tiles = min(max(tiles, 1), workspace.num_tiles)
    return triton.cdiv(workspace.num_tiles, tiles), tiles


# The order of tokens


@triton.jit
def _key(value):
    """int32, ordered as float32 `value` is; -0 equals 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _rank(value, id):
    """int64, larger for what comes first: the larger value, of equals the lower id."""
    return (_key(value).to(tl.int64) << 32) | (0xFFFFFFFF - id.to(tl.int64))


@triton.jit
def _id_of(rank):
    return (0xFFFFFFFF - (rank & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _value_of(rank):
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _midway(low, high):
    """The mean, rounded down; int64, where the sum might not fit."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _select(ranks, low, high, wanted, room):
    """A cut which from `wanted` to `room` of `ranks` reach, or the largest that `wanted` reach.

    At least `wanted` reach `low`, fewer reach `high`.
    """
    middle = _midway(low, high)
    while middle > low:
        count = tl.sum((ranks >= middle).to(tl.int32))
        high = tl.where(count < wanted, middle, tl.where(count <= room, middle + 1, high))
        low = tl.where(count < wanted, low, middle)
        middle = _midway(low, high)
    return low


# Logits in fours of ids


@triton.jit
def _is_edited(floats, integers, slot):
    repetition = tl.load(floats + slot * _NUM_FLOATS + 3)
    frequency = tl.load(floats + slot * _NUM_FLOATS + 4)
    presence = tl.load(floats + slot * _NUM_FLOATS + 5)
    num_edits = tl.load(integers + slot * _NUM_INTEGERS + 3)
    return (repetition != 1) | (frequency != 0) | (presence != 0) | (num_edits > 0)


@triton.jit
def _source(logits, edited, floats, integers, row, slot, stride, vocab_size, FULL: tl.constexpr):  # noqa: N803
    """Where a row's logits are: (raw, edited, how many ids count of each, vocabulary size)."""
    num_edited = 0
    if FULL:
        num_edited = tl.where(_is_edited(floats, integers, slot), vocab_size, 0)
    edited += row * vocab_size
    return logits + row * stride, edited, vocab_size - num_edited, num_edited, vocab_size


@triton.jit
def _load(source, ids, mask, FULL: tl.constexpr):  # noqa: N803
    """float32 logits of a row, -inf where not `mask`; a masked load costs no bytes."""
    logits, edited, num_raw, num_edited, _ = source
    if FULL:
        raw = tl.load(logits + ids, mask=mask & (ids < num_raw), other=-float("inf"))
        new = tl.load(edited + ids, mask=mask & (ids < num_edited), other=-float("inf"))
        return tl.maximum(raw.to(tl.float32), new)
    else:
        return tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def _ids(quads):
    return quads[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _words(seed, index, quads):
    """[quads, 4] uint32: Philox4x32-10 of counter (quad, index, 0, 0) under the seed's words.

    Written out with 64-bit products, which are one instruction each; `tl.philox` computes the same
    with two.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = quads.to(tl.uint32)
    c1 = c0 * 0 + index.to(tl.uint32)
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [quads.shape[0], 4])


@triton.jit
def _in_1_to_2(words):
    """1 + (word >> 9) / 2**23, by writing the mantissa."""
    return ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(words):
    """-log(-log(u)) of u = ((word >> 9) + 0.5) / 2**23, which the subtraction gives exactly."""
    uniform = _in_1_to_2(words) - 0.999999940395355224609375
    return -tl.log(-tl.log(uniform))


@triton.jit
def _most_gumbel(words):
    """No less than `_gumbel`: -log(-log(u)) <= -log(1 - u), and log2 x >= bits(x) / 2**23 - 127.

    What is subtracted is 1 - u less 2**-24, so still exact; the last 1e-4 covers every rounding.
    """
    rest = 1.99999988079071044921875 - _in_1_to_2(words)
    bits = rest.to(tl.int32, bitcast=True).to(tl.float32)
    return tl.fma(bits, -8.262958e-08, 127 * 0.6931471805599453 + 1e-4)


@triton.jit
def _contest(x, ids, quads, temperature, seed, index, best, best_ids, bar):
    """Puts a tile of logits, perturbed, against the best of every lane; `bar` is the best of all.

    Of equals the earlier tile's stays, so tiles come with ascending ids.
    """
    words = _words(seed, index, quads)
    inverse = 1 / temperature
    most = tl.maximum(x * (inverse * (1 - 1e-6)), x * (inverse * (1 + 1e-6)))
    if tl.max(most + _most_gumbel(words)) >= bar:
        score = tl.div_rn(x, temperature) + _gumbel(words)
        ahead = score > best
        best = tl.where(ahead, score, best)
        best_ids = tl.where(ahead, ids, best_ids)
        bar = tl.max(best)
    return best, best_ids, bar


# The first pass


@triton.jit
def _draw_kernel(
    logits,
    edited,
    slots,
    output_index,
    floats,
    integers,
    best_out,
    group_max,
    vocab_size,
    stride,
    num_groups,
    num_tiles,
    tiles_per_program,
    FULL: tl.constexpr,  # noqa: N803
    QUADS: tl.constexpr,  # noqa: N803
):
    """The best token of a part of a row, before filters, and the group maxima of a filtered row."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    index = tl.load(output_index + row).to(tl.int32)
    temperature = tl.load(floats + slot * _NUM_FLOATS)
    top_p = tl.load(floats + slot * _NUM_FLOATS + 1)
    min_p = tl.load(floats + slot * _NUM_FLOATS + 2)
    seed = tl.load(integers + slot * _NUM_INTEGERS)
    top_k = tl.load(integers + slot * _NUM_INTEGERS + 1)
    source = _source(logits, edited, floats, integers, row, slot, stride, vocab_size, FULL)
    group_max += row * num_groups

    random = temperature > 0
    by_rank = random & (top_k > 0) & (top_k < vocab_size)  # settled from the maxima alone
    filtered = by_rank | (random & ((top_p < 1) | (min_p > 0)))
    first = tl.program_id(0) * tiles_per_program
    best = tl.full([QUADS, 4], -float("inf"), tl.float32)
    best_ids = _ids(first * QUADS + tl.arange(0, QUADS))
    bar = tl.max(best)
    last = tl.minimum(first + tiles_per_program, num_tiles)
    end = tl.minimum(last * QUADS * 4, vocab_size)
    following = _load(source, best_ids, best_ids < end, FULL)
    for tile in range(first, last):
        x = following
        quads = tile * QUADS + tl.arange(0, QUADS)
        ids = _ids(quads)
        # On its way while this tile is worked on.
        following = _load(source, ids + QUADS * 4, ids + QUADS * 4 < end, FULL)
        if filtered:
            groups = tile * (QUADS // _GROUP_QUADS) + tl.arange(0, QUADS // _GROUP_QUADS)
            maxima = tl.max(tl.reshape(x, [QUADS // _GROUP_QUADS, _GROUP]), axis=1)
            tl.store(group_max + groups, maxima, mask=groups < num_groups)
        if not by_rank:
            if random:
                best, best_ids, bar = _contest(
                    x, ids, quads, temperature, seed, index, best, best_ids, bar
                )
            else:
                ahead = x > best
                best = tl.where(ahead, x, best)
                best_ids = tl.where(ahead, ids, best_ids)
    tl.store(best_out + row * num_tiles + tl.program_id(0), tl.max(_rank(best, best_ids)))


# The second pass


@triton.jit
def _settle_kernel(
    logits,
    edited,
    slots,
    output_index,
    floats,
    integers,
    best,
    group_max,
    sums,
    arrivals,
    group_list,
    out_tokens,
    vocab_size,
    stride,
    num_groups,
    num_tiles,
    tiles_per_program,
    num_splits,
    FULL: tl.constexpr,  # noqa: N803
    QUADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
):
    """Writes the token of a row. One program does, except that with top_p and without top_k all
    programs sum the weights of a part each, and the last to arrive does the rest."""
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * _NUM_FLOATS)
    top_p = tl.load(floats + slot * _NUM_FLOATS + 1)
    min_p = tl.load(floats + slot * _NUM_FLOATS + 2)
    top_k = tl.load(integers + slot * _NUM_INTEGERS + 1)
    random = temperature > 0
    by_rank = random & (top_k > 0) & (top_k < vocab_size)
    by_weight = random & (top_p < 1)
    filtered = by_rank | by_weight | (random & (min_p > 0))
    shared = by_weight & (by_rank == 0)
    if shared | (split == 0):
        parts = tl.arange(0, TILES)
        won = tl.load(best + row * num_tiles + parts, mask=parts < num_splits, other=_LOWEST)
        token = tl.minimum(_id_of(tl.max(won)), vocab_size - 1)
        if not filtered:
            tl.store(out_tokens + row, token.to(tl.int64))
        else:
            source = _source(logits, edited, floats, integers, row, slot, stride, vocab_size, FULL)
            groups = tl.arange(0, GROUPS)
            exists = groups < num_groups
            maxima = tl.load(
                group_max + row * num_groups + groups, mask=exists, other=-float("inf")
            )
            # Division keeps the order, so this is the largest of the divided logits.
            largest = tl.div_rn(tl.max(maxima), temperature)
            low = tl.cast(_LOWEST, tl.int64)
            if min_p > 0:
                low = _key(largest + tl.log(min_p)).to(tl.int64) << 32
            drawn = _rank_of_token(source, token, temperature, FULL)
            arrived = 0
            total = tl.cast(0, tl.int64)
            before = tl.cast(0, tl.int64)
            if shared:
                totals = tl.zeros([QUADS, 4], tl.int64)
                befores = tl.zeros([QUADS, 4], tl.int64)
                first = split * tiles_per_program
                for tile in range(first, tl.minimum(first + tiles_per_program, num_tiles)):
                    ids = _ids(tile * QUADS + tl.arange(0, QUADS))
                    x = _load(source, ids, ids < vocab_size, FULL)
                    scaled = tl.div_rn(x, temperature)
                    ranks = _rank(scaled, ids)
                    weights = tl.where(ranks >= low, _weight(scaled - largest), 0)
                    totals += weights
                    befores += tl.where(ranks > drawn, weights, 0)
                sums += row * num_tiles * 2
                tl.store(sums + split * 2, tl.sum(totals))
                tl.store(sums + split * 2 + 1, tl.sum(befores))
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + row, 1)
                if arrived == num_splits - 1:
                    # Past the first-level cache, which may hold what a neighbour's row had there.
                    there = parts < num_splits
                    total = tl.sum(
                        tl.load(sums + parts * 2, mask=there, other=0, cache_modifier=".cg")
                    )
                    before = tl.sum(
                        tl.load(sums + parts * 2 + 1, mask=there, other=0, cache_modifier=".cg")
                    )
                    tl.store(arrivals + row, 0)
            if (shared == 0) | (arrived == num_splits - 1):
                seed = tl.load(integers + slot * _NUM_INTEGERS)
                index = tl.load(output_index + row).to(tl.int32)
                token = _settle(
                    source,
                    group_list + row * num_groups,
                    groups,
                    exists,
                    maxima,
                    largest,
                    token,
                    drawn,
                    low,
                    total,
                    before,
                    temperature,
                    seed,
                    index,
                    top_k,
                    top_p,
                    by_rank,
                    by_weight,
                    num_groups,
                    FULL,
                )
                tl.store(out_tokens + row, token.to(tl.int64))


@triton.jit
def _settle(
    source,
    group_list,
    groups,
    exists,
    maxima,
    largest,
    token,
    drawn,
    low,
    total,
    before,
    temperature,
    seed,
    index,
    top_k,
    top_p,
    by_rank,
    by_weight,
    num_groups,
    FULL: tl.constexpr,  # noqa: N803
):
    """The token of a filtered row. Kept are the ranks from `low` on.

    Without top_k, `token` of rank `drawn` is the winner among all, the kept ones weigh `total`, and
    those before it `before`. With top_k, none of the three is known yet.
    """
    target = tl.maximum(total.to(tl.float64) * top_p.to(tl.float64), 1.0)
    passes = (by_weight == 0) | (before.to(tl.float64) < target)
    settled = (by_rank == 0) & (drawn >= low) & passes
    if not settled:
        if by_rank == 0:
            low = tl.maximum(low, tl.where(passes, low, drawn + 1))
        ranks = tl.where(exists, _rank(tl.div_rn(maxima, temperature), groups), _LOWEST)
        high = (_key(largest).to(tl.int64) + 1) << 32
        cut = low
        if by_rank:
            wanted = tl.minimum(top_k, num_groups).to(tl.int32)
            room = tl.cdiv(wanted, _LIST_GROUPS) * _LIST_GROUPS
            cut = _select(ranks, tl.cast(_LOWEST, tl.int64), high, wanted, room)
        else:
            cut = _least_of_value(cut)
        chosen = exists & (ranks >= cut)
        listed = tl.sum(chosen.to(tl.int32))
        tl.store(group_list + tl.cumsum(chosen.to(tl.int32), 0) - 1, groups, mask=chosen)
        tl.debug_barrier()
        if by_rank:
            cut = _least_of_value(cut)
            if listed <= _LIST_GROUPS:
                cut = _select_of_few(
                    source, group_list, listed, temperature, cut, high, top_k, FULL
                )
            else:
                cut = _select_of_many(
                    source, group_list, listed, temperature, cut, high, top_k, FULL
                )
            low = tl.maximum(low, cut)
            if by_weight:
                total = _weigh(source, group_list, listed, temperature, largest, low, FULL)
                target = tl.maximum(total.to(tl.float64) * top_p.to(tl.float64), 1.0)
        while not settled:
            winner = _draw_listed(source, group_list, listed, temperature, seed, index, low, FULL)
            token = _id_of(winner)
            settled = (by_weight == 0) | (_value_of(winner) == -float("inf"))
            if not settled:
                drawn = _rank_of_token(source, token, temperature, FULL)
                low = drawn + 1
                before = _weigh(source, group_list, listed, temperature, largest, low, FULL)
                settled = before.to(tl.float64) < target
    return token


@triton.jit
def _least_of_value(rank):
    """The least rank of any token with the logit that `rank` has."""
    return (rank >> 32) << 32


@triton.jit
def _rank_of_token(source, token, temperature, FULL: tl.constexpr):  # noqa: N803
    x = _load(source, token, token >= 0, FULL)
    return _rank(tl.div_rn(x, temperature), token)


# A list of groups, in the order of their ids: what remains to be looked at of a row


@triton.jit
def _listed(source, group_list, tile, listed, FULL: tl.constexpr):  # noqa: N803
    """Quads, ids and logits [quads, 4] of a tile of the listed groups; what is behind the list's
    end has an id beyond the vocabulary, and a logit of -inf."""
    vocab_size = source[4]
    QUADS: tl.constexpr = _LIST_GROUPS * _GROUP_QUADS  # noqa: N806
    offsets = tl.arange(0, QUADS)
    places = tile * _LIST_GROUPS + offsets // _GROUP_QUADS
    groups = tl.load(group_list + places, mask=places < listed, other=0)
    groups = tl.where(places < listed, groups, vocab_size // _GROUP + 1)
    quads = groups * _GROUP_QUADS + offsets % _GROUP_QUADS
    ids = _ids(quads)
    return quads, ids, _load(source, ids, ids < vocab_size, FULL)


@triton.jit
def _listed_ranks(source, group_list, tile, listed, temperature, FULL: tl.constexpr):  # noqa: N803
    _, ids, x = _listed(source, group_list, tile, listed, FULL)
    return tl.where(ids < source[4], _rank(tl.div_rn(x, temperature), ids), _LOWEST)


@triton.jit
def _select_of_few(
    source,
    group_list,
    listed,
    temperature,
    low,
    high,
    top_k,
    FULL: tl.constexpr,  # noqa: N803
):
    """The rank of the k-th token, of one tile that stays in registers."""
    ranks = _listed_ranks(source, group_list, 0, listed, temperature, FULL)
    return _select(ranks, low, high, top_k, top_k)


@triton.jit
def _select_of_many(
    source,
    group_list,
    listed,
    temperature,
    low,
    high,
    top_k,
    FULL: tl.constexpr,  # noqa: N803
):
    """The same of any number of tiles, each read again for every bit of the result."""
    middle = _midway(low, high)
    while middle > low:
        count = tl.cast(0, tl.int32)
        for tile in range(tl.cdiv(listed, _LIST_GROUPS)):
            ranks = _listed_ranks(source, group_list, tile, listed, temperature, FULL)
            count += tl.sum((ranks >= middle).to(tl.int32))
        high = tl.where(count < top_k, middle, tl.where(count == top_k, middle + 1, high))
        low = tl.where(count < top_k, low, middle)
        middle = _midway(low, high)
    return low


@triton.jit
def _draw_listed(
    source,
    group_list,
    listed,
    temperature,
    seed,
    index,
    low,
    FULL: tl.constexpr,  # noqa: N803
):
    """The winner among the tokens whose rank is `low` or more, with its perturbed logit."""
    QUADS: tl.constexpr = _LIST_GROUPS * _GROUP_QUADS  # noqa: N806
    best = tl.full([QUADS, 4], -float("inf"), tl.float32)
    best_ids = tl.zeros([QUADS, 4], tl.int32)
    bar = tl.max(best)
    for tile in range(tl.cdiv(listed, _LIST_GROUPS)):
        quads, ids, x = _listed(source, group_list, tile, listed, FULL)
        x = tl.where(_rank(tl.div_rn(x, temperature), ids) >= low, x, -float("inf"))
        best, best_ids, bar = _contest(x, ids, quads, temperature, seed, index, best, best_ids, bar)
    return tl.max(_rank(best, best_ids))


@triton.jit
def _weigh(
    source,
    group_list,
    listed,
    temperature,
    largest,
    low,
    FULL: tl.constexpr,  # noqa: N803
):
    """The weight of the tokens whose rank is `low` or more."""
    total = tl.cast(0, tl.int64)
    for tile in range(tl.cdiv(listed, _LIST_GROUPS)):
        _, ids, x = _listed(source, group_list, tile, listed, FULL)
        scaled = tl.div_rn(x, temperature)
        total += tl.sum(tl.where(_rank(scaled, ids) >= low, _weight(scaled - largest), 0))
    return total


@triton.jit
def _weight(gap):
    """int64: exp(gap) * 2**40, gap <= 0, rounded down.

    exp as CUDA's expf has it: 2**whole * 2**part, the part from a product in two pieces and by the
    device's exp2, so that torch on the same device should give the same bits. Its last place may
    differ elsewhere, which moves the cut of top_p if the target lies within 1e-7 of a sum.
    """
    gap = tl.maximum(gap, -30.0)  # e**-30 * 2**40 < 1
    whole = tl.floor(tl.fma(gap, 1.4426950408889634, 0.5))
    part = tl.fma(gap, 1.44269502162933349609375, -whole)
    part = tl.fma(gap, 1.925963033500011e-08, part)
    scale = ((whole.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # 2**(whole + 40)
    return (tl.exp2(part) * scale).to(tl.int64)


# What the full variant adds


@triton.jit
def _penalize(x, ids, slot, seen, counts, repetition, frequency, presence, mask):
    count = tl.load(counts + ids, mask=mask, other=0)
    generated = count > 0
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where((tl.load(seen + ids, mask=mask, other=0) != 0) | generated, repeated, x)
    return x - count.to(tl.float32) * frequency - tl.where(generated, presence, 0.0)


@triton.jit
def _edit_kernel(
    logits,
    edited,
    slots,
    output_index,
    floats,
    integers,
    edit_ids,
    edit_bias,
    prompt_seen,
    output_counts,
    num_logprobs,
    raw_max,
    tile_sums,
    vocab_size,
    stride,
    edit_stride,
    num_groups,
    num_tiles,
    tiles_per_program,
    QUADS: tl.constexpr,  # noqa: N803
    EDITS: tl.constexpr,  # noqa: N803
):
    """A part of a row: its logits with edits and penalties, if it has any, as float32, and what
    logprobs need of the raw ones: group maxima, and each tile's maximum and sum of exponentials."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    is_edited = _is_edited(floats, integers, slot)
    scored = tl.load(num_logprobs + slot) >= 0
    logits += row * stride
    edited += row * vocab_size
    prompt_seen += slot * vocab_size
    output_counts += slot * vocab_size
    repetition = tl.load(floats + slot * _NUM_FLOATS + 3)
    frequency = tl.load(floats + slot * _NUM_FLOATS + 4)
    presence = tl.load(floats + slot * _NUM_FLOATS + 5)
    penalized = (repetition != 1) | (frequency != 0) | (presence != 0)
    num_penalized = tl.where(penalized, vocab_size, 0)
    first = tl.program_id(0) * tiles_per_program
    last = tl.minimum(first + tiles_per_program, num_tiles)
    if is_edited | scored:
        for tile in range(first, last):
            ids = _ids(tile * QUADS + tl.arange(0, QUADS))
            mask = ids < vocab_size
            x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
            if scored:
                groups = tile * (QUADS // _GROUP_QUADS) + tl.arange(0, QUADS // _GROUP_QUADS)
                maxima = tl.max(tl.reshape(x, [QUADS // _GROUP_QUADS, _GROUP]), axis=1)
                tl.store(raw_max + row * num_groups + groups, maxima, mask=groups < num_groups)
                largest = tl.max(maxima)
                finite = tl.where(largest == -float("inf"), 0.0, largest)
                sums = tile_sums + (row * num_tiles + tile) * 2
                tl.store(sums, largest)
                tl.store(sums + 1, tl.sum(tl.exp(x - finite)))
            if is_edited:
                use = ids < num_penalized
                x = _penalize(
                    x, ids, slot, prompt_seen, output_counts, repetition, frequency, presence, use
                )
                tl.store(edited + ids, x, mask=mask)
    if is_edited:
        # An id may occur a second time, to be masked: that comes last.
        num_edits = tl.load(integers + slot * _NUM_INTEGERS + 3)
        min_tokens = tl.load(integers + slot * _NUM_INTEGERS + 2)
        end_of_masks = tl.where(tl.load(output_index + row) < min_tokens, num_edits, 0)
        for masking in tl.static_range(2):
            tl.debug_barrier()
            for start in range(0, num_edits, EDITS):
                place = start + tl.arange(0, EDITS)
                there = place < num_edits
                ids = tl.load(edit_ids + slot * edit_stride + place, mask=there, other=0)
                bias = tl.load(edit_bias + slot * edit_stride + place, mask=there, other=0.0)
                is_mask = bias == -float("inf")
                use = there & (ids >= first * QUADS * 4) & (ids < last * QUADS * 4)
                if masking:
                    tl.store(edited + ids, bias, mask=use & is_mask & (place < end_of_masks))
                else:
                    use = use & (is_mask == 0)
                    x = tl.load(logits + ids, mask=use, other=0.0).to(tl.float32) + bias
                    x = _penalize(
                        x,
                        ids,
                        slot,
                        prompt_seen,
                        output_counts,
                        repetition,
                        frequency,
                        presence,
                        use & (ids < num_penalized),
                    )
                    tl.store(edited + ids, x, mask=use)


@triton.jit
def _record_kernel(
    logits,
    slots,
    floats,
    out_tokens,
    output_counts,
    num_logprobs,
    raw_max,
    tile_sums,
    group_list,
    logprob,
    top_ids,
    top_logprobs,
    vocab_size,
    stride,
    num_groups,
    num_tiles,
    num_rivals,
    GROUPS: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
):
    """Counts a row's token if the row has penalties, and scores it and its rivals if it asked.

    The rivals are taken one by one: first the groups with the largest maxima, then their tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.load(out_tokens + row)
    repetition = tl.load(floats + slot * _NUM_FLOATS + 3)
    frequency = tl.load(floats + slot * _NUM_FLOATS + 4)
    presence = tl.load(floats + slot * _NUM_FLOATS + 5)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        tl.atomic_add(output_counts + slot * vocab_size + token, 1)  # padded rows share a slot
    wanted = tl.minimum(tl.load(num_logprobs + slot), num_rivals)
    if wanted >= 0:
        logits += row * stride
        group_list += row * num_groups
        tiles = tl.arange(0, TILES)
        sums = tile_sums + (row * num_tiles + tiles) * 2
        maxima = tl.load(sums, mask=tiles < num_tiles, other=-float("inf"))
        largest = tl.max(maxima)
        parts = tl.load(sums + 1, mask=tiles < num_tiles, other=0.0)
        log_sum = tl.log(tl.sum(parts * tl.exp(maxima - largest)))
        x = tl.load(logits + token).to(tl.float32)
        tl.store(logprob + row, x - largest - log_sum)

        groups = tl.arange(0, GROUPS)
        exists = groups < num_groups
        maxima = tl.load(raw_max + row * num_groups + groups, mask=exists, other=-float("inf"))
        ranks = tl.where(exists, _rank(maxima, groups), _LOWEST)
        listed = tl.minimum(wanted, num_groups)
        for place in range(listed):
            best = tl.max(ranks)
            tl.store(group_list + place, _id_of(best))
            ranks = tl.where(ranks == best, _LOWEST, ranks)
        tl.debug_barrier()
        source = (logits, logits, vocab_size, 0, vocab_size)
        _, ids, x = _listed(source, group_list, 0, listed, False)
        rivals = tl.where(ids < vocab_size, _rank(x, ids), _LOWEST)
        for place in range(wanted):
            best = tl.max(rivals)
            rivals = tl.where(rivals == best, _LOWEST, rivals)
            tl.store(top_ids + row * num_rivals + place, _id_of(best).to(tl.int64))
            score = _value_of(best) - largest - log_sum
            tl.store(top_logprobs + row * num_rivals + place, score)
