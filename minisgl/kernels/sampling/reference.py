"""Sampling a token from each row of logits: the torch reference, for any device.

Every function works row by row: a row's result does not depend on the rest of the batch, bit for
bit. No function reads a tensor back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minisgl.kernels.sampling.order import order_keys
from minisgl.kernels.sampling.philox import uniform
from minisgl.matcher import WORD_BITS


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled."""

    temperature: Tensor  # [rows] float32; 0: greedy
    seed: Tensor  # [rows] int64
    output_index: Tensor  # [rows] int64: the number of output tokens before this one
    # By name, each [rows]: top_n_sigma and min_p (float32, 0: off), top_k (int64, 0: off), top_p
    # (float32, 1: off, 0: the likeliest token). One that is not there is off for all rows, and
    # costs nothing.
    filters: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Natural logarithms of probabilities: of one token a row, and of the row's most likely
    tokens."""

    logprob: Tensor  # [rows] float32
    rank: Tensor  # [rows] int64: its place in the row, likeliest first, from 1 on
    top_ids: Tensor  # [rows, k] int64, likeliest first; of equals the lower id first
    top_logprobs: Tensor  # [rows, k] float32


def top_logprobs(
    logits: Tensor, token_ids: Tensor, k: int, drawn: Tensor | None = None
) -> TokenScores:
    """Logprobs and ranks of `token_ids` [rows] int64, and logprobs of each row's k likeliest
    tokens, under `logits` [rows, vocab] float32. drawn: of `filtered`, to score these in place of
    the logits, in whose order the tokens stay."""
    logprobs = (logits if drawn is None else drawn).log_softmax(dim=-1)
    own = token_ids[:, None]
    value = logits.gather(1, own)
    is_before = torch.arange(logits.shape[1], device=logits.device) < own  # where they are equal
    precedes = (logits > value) | ((logits == value) & is_before)
    if k == 0:
        top_ids = token_ids.new_empty((len(token_ids), 0))
    else:
        top_ids = order_keys(logits).topk(min(k, logits.shape[1]), dim=-1).indices
    return TokenScores(
        logprob=logprobs.gather(1, own).squeeze(1),
        rank=1 + precedes.sum(dim=1),
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )


def add_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Adds `bias` [rows, width] float32 to the logits of `ids` [rows, width] int64.

    An id may occur again with a bias of 0 (padding) or -inf: the order of addition is undefined.
    """
    return logits.scatter_add(1, ids, bias)


def penalize(
    logits: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Applies repetition, then frequency and presence penalty to biased `logits` [rows, vocab]
    float32.

    `prompt_seen` [rows, vocab] bool and `output_counts` [rows, vocab] int32: the tokens of the
    request; the penalties: [rows] float32, with 1, 0 and 0 for none. Repetition penalty (Keskar et
    al., "CTRL", 2019): tokens in prompt or output have positive logits divided and negative ones
    multiplied by it. The other two count tokens of the output only.
    """
    generated = output_counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(prompt_seen | generated, repeated, logits)
    return logits - output_counts * frequency[:, None] - generated * presence[:, None]


def mask_tokens(logits: Tensor, words: Tensor, first_id: int = 0) -> Tensor:
    """Sets the logits [rows, ids] of the tokens that are not allowed to -inf.

    `words` [rows, words] int32: packed masks, as MaskRows; all bits are 1 for a row without a mask.
    The logits may be those of a vocabulary shard that starts at `first_id`.
    """
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    allowed = words[:, ids // WORD_BITS] >> (ids % WORD_BITS).int() & 1
    return logits.masked_fill(allowed == 0, -torch.inf)


def perturb(logits: Tensor, rows: SamplingRows, first_id: int = 0) -> Tensor:
    """Filters and adds Gumbel noise: the argmax of the result [rows, vocab] float32 is the token
    (the Gumbel-max trick, Gumbel 1954).

    `logits` [rows, vocab] float32 have bias, penalties and masks applied. Greedy rows are returned
    as they are; the others after temperature and filters with noise added, so that the argmax is a
    sample of the remaining tokens. A token's noise does not depend on the filters.
    Without filters the logits may be a vocabulary shard that starts at `first_id`, a multiple of 4.
    """
    kept = filtered(logits, rows)
    uniform_numbers = uniform(rows.seed, rows.output_index, logits.shape[1], first_id)
    gumbel = -(-uniform_numbers.log()).log()
    return torch.where(rows.temperature[:, None] == 0, kept, kept + gumbel)


def filtered(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The logits [rows, vocab] float32 after temperature, and -inf for those that the filters take
    away. Greedy rows are returned as they are."""
    greedy = rows.temperature[:, None] == 0
    temperature = rows.temperature[:, None].masked_fill(greedy, 1.0)
    scaled = logits / temperature
    if (num := rows.filters.get("top_n_sigma")) is not None:
        least = (logits.amax(dim=-1) - num * deviation(logits))[:, None] / temperature
        scaled = scaled.masked_fill((scaled < least) & (num > 0)[:, None], -torch.inf)
    min_p, top_k, top_p = map(rows.filters.get, ("min_p", "top_k", "top_p"))
    if min_p is not None:
        floor = scaled.amax(dim=-1, keepdim=True) + min_p[:, None].log()
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if top_k is not None or top_p is not None:
        scaled = scaled.masked_fill(~_keep_top(scaled, top_k, top_p), -torch.inf)
    return torch.where(greedy, logits, scaled)


def deviation(logits: Tensor) -> Tensor:
    """The standard deviation of each row's logits, without those of -inf: [rows] float32.

    They count in steps of 2**-10 and up to a size of 2**10, because sums of integers do not depend
    on the order of addition; they are exact for a vocabulary of up to 2**23.
    """
    counted = logits > -torch.inf
    steps = (logits.clamp(-(2.0**10), 2.0**10) * 2.0**10 + 0.5).floor()
    steps = steps.masked_fill(~counted, 0.0).long()
    count = counted.sum(dim=-1).clamp(min=1).double()
    mean = steps.sum(dim=-1).double() / count
    variance = (steps * steps).sum(dim=-1).double() / count - mean * mean
    return variance.clamp(min=0.0).float().sqrt() * 2.0**-10


def _keep_top(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """[rows, vocab] bool: the k largest logits, and of those the fewest that reach top_p. Of equal
    logits the lower id comes first."""
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        limit = top_k.masked_fill(top_k == 0, scaled.shape[1])
        kept = torch.arange(scaled.shape[1], device=scaled.device) < limit[:, None]
    if top_p is not None:
        weights = (ordered - ordered[:, :1]).exp().masked_fill(~kept, 0.0)
        # Integers, since a sum of floats depends on the order of addition, and so on the shape of
        # the batch. The largest weight is 2**40, which leaves room for a vocabulary of 2**23.
        parts = (weights * 2.0**40).long()
        sums = parts.cumsum(dim=-1)
        target = (sums[:, -1] * top_p.double()).masked_fill(top_p >= 1, torch.inf)
        kept = kept & (sums - parts < target.clamp(min=1.0)[:, None])  # the first one always
    return torch.zeros_like(kept).scatter(1, ids, kept)


def margin(perturbed: Tensor) -> Tensor:
    """[rows] float32: the distance between the best token and the next. Where it is below the
    rounding of the logits, two ways to compute them may choose differently."""
    best = perturbed.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
