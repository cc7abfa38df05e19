"""Inboxes through which the GPUs of one host leave each other rows.

For few rows, such as those of a decode step, a collective costs latency, not bandwidth. So nobody
asks and nobody waits twice: a rank writes what it has straight into an inbox that every rank keeps
for it, and looks into its own until everything has come. An element travels as one word: its bits,
and as many that say which exchange it belongs to. A word arrives whole, so that no other signal is
needed (the LL protocol of NCCL; Hu et al., arXiv 2507.04786).

The exchanges of a row are counted on the device, by each rank for itself; all come to the same
count, since all have the same exchanges in the same order. Inboxes alternate between two halves. A
half is written again two exchanges later, by a rank that has seen the one in between, which its
owner sent only after it was done with that half. So what a word says need only tell an exchange
from the one two before.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Of one rank and one stream."""

    # [2, ranks, max_rows, size], zero at first: words that all ranks write. int32 for elements of
    # 16 bits, int64 for those of 32.
    inbox: Tensor
    addresses: tuple[int, ...]  # of each rank's inbox, as this one addresses it
    exchanges: Tensor  # [max_rows] int32, zero at first: of each row, those so far
    rank: int

    @property
    def num_ranks(self) -> int:
        return self.inbox.shape[1]

    @property
    def max_rows(self) -> int:
        return self.inbox.shape[2]

    @property
    def size(self) -> int:
        return self.inbox.shape[3]

    @property
    def targets(self) -> tuple[int, ...]:
        """The addresses in the order in which this rank writes to them: see `after`."""
        return after(self.rank, self.addresses)

    def takes(self, rows: Tensor) -> bool:
        """Whether its words are those of such rows, [any, size]."""
        return rows.shape[1] == self.size and self.inbox.itemsize == 2 * rows.itemsize


def after(rank: int, addresses: tuple[int, ...]) -> tuple[int, ...]:
    """Those of all ranks, from the next one on and with `rank`'s own last, so that they do not all
    write to the same one at a time. A kernel that takes them so is compiled once for all ranks."""
    return addresses[rank + 1 :] + addresses[: rank + 1]


@triton.jit
def pointer(address, kind: tl.constexpr):
    """To what is aligned to 16 bytes, as allocations are."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def send(targets, there, elements, exchange, inside):
    """Elements of this rank, of 16 or 32 bits, to the places `there` of all inboxes. `exchange`:
    int32."""
    if elements.dtype.primitive_bitwidth == 16:
        high = elements.to(tl.int16, bitcast=True).to(tl.int32) << 16
        words = high | (exchange & 0xFFFF)
    else:
        high = elements.to(tl.int32, bitcast=True).to(tl.int64) << 32
        words = high | (exchange.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(len(targets)):
        inbox = pointer(targets[step], words.dtype)
        tl.store(inbox + there, words, mask=inside, cache_modifier=".wt")


@triton.jit
def receive(place, inside, exchange, kind: tl.constexpr):
    """The elements of this exchange at these places of the own inbox, once all are there; zero
    where nothing is expected."""
    words, missing = _look(place, inside, exchange)
    while missing > 0:
        words, missing = _look(place, inside, exchange)
    if words.dtype == tl.int32:
        return (words >> 16).to(tl.int16).to(kind, bitcast=True)
    else:
        return (words >> 32).to(tl.int32).to(kind, bitcast=True)


@triton.jit
def _look(place, inside, exchange):
    words = tl.load(place, mask=inside, other=0, volatile=True)
    if words.dtype == tl.int32:
        difference = (words ^ exchange) & 0xFFFF
    else:
        difference = (words ^ exchange.to(tl.int64)) & 0xFFFFFFFF
    return words, tl.sum((inside & (difference != 0)).to(tl.int32))
