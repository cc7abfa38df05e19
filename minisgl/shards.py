"""Which layers a pipeline stage holds, and which part of each dimension a tensor-parallel rank.

Megatron-LM's division (Shoeybi et al., arXiv 1909.08053): the first product of attention and of the
MLP is split by its outputs, the second by its inputs, so that a layer needs two sums over the
ranks and nothing else. The vocabulary is split for the embedding and for the head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

# Parts of the vocabulary begin at a multiple of it: the noise of ids comes in fours, and products
# are fast where the rows of their result are aligned.
VOCAB_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """`size` entries from `first` on, of a dimension with `whole`. Those past its end are padding,
    zeros that no checkpoint has."""

    first: int
    size: int
    whole: int

    @property
    def num_real(self) -> int:
        return max(0, min(self.size, self.whole - self.first))

    def times(self, width: int) -> Shard:
        """The same part of a dimension in which every entry is `width` wide."""
        return Shard(self.first * width, self.size * width, self.whole * width)


def whole(size: int) -> Shard:
    """What every rank holds."""
    return Shard(0, size, size)


def even_shard(size: int, rank: int, num_ranks: int) -> Shard:
    assert size % num_ranks == 0, "what does not divide is refused by resolve"
    part = size // num_ranks
    return Shard(rank * part, part, size)


def block_shard(size: int, block: int, rank: int, num_ranks: int) -> Shard:
    """Parts of one size, each of whole blocks; the last ones may be padded."""
    part = -(-size // (block * num_ranks)) * block
    return Shard(rank * part, part, size)


def uneven_shard(size: int, rank: int, num_ranks: int) -> Shard:
    """Parts that differ by one at most. There must be no more ranks than entries."""
    first, end = (size * each // num_ranks for each in (rank, rank + 1))
    return Shard(first, end - first, size)


def kv_head_shard(num_kv_heads: int, rank: int, num_ranks: int) -> Shard:
    """Where there are fewer than ranks, several hold the same one."""
    if num_ranks <= num_kv_heads:
        return even_shard(num_kv_heads, rank, num_ranks)
    return Shard(rank * num_kv_heads // num_ranks, 1, num_kv_heads)


def vocab_shard(vocab_size: int, rank: int, num_ranks: int) -> Shard:
    """Parts of one size; the last ones may be padded."""
    if num_ranks == 1:
        return whole(vocab_size)
    multiple = num_ranks * VOCAB_MULTIPLE
    part = -(-vocab_size // multiple) * VOCAB_MULTIPLE
    return Shard(rank * part, part, vocab_size)


def split_layers(num_layers: int, num_stages: int, head: float) -> tuple[range, ...]:
    """The layers of each pipeline stage, such that the slowest takes the least time.

    head: what the head of the model, on the last stage, costs in layers. The embedding, on the
    first, costs nothing: it reads a few rows. Every stage gets a layer, so there must be as many.
    """
    assert 1 <= num_stages <= num_layers, "other numbers are refused by resolve"
    others = num_stages - 1
    last = num_layers
    if others:
        last = min(
            range(1, num_layers - others + 1),
            key=lambda size: max(size + head, -(-(num_layers - size) // others)),
        )
    ends = [(num_layers - last) * stage // others for stage in range(1, num_stages)]
    return tuple(itertools.starmap(range, itertools.pairwise((0, *ends, num_layers))))


def can_divide(
    num_ranks: int, *, num_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int
) -> bool:
    """Whether a model of these sizes can be split over so many ranks."""
    return (
        num_heads % num_ranks == 0
        and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
        and intermediate_size % num_ranks == 0
        and vocab_shard(vocab_size, num_ranks - 1, num_ranks).num_real > 0
    )
