"""LL all-reduce buffers: inboxes through which the GPUs of one host send each other rows.

For few rows, such as those of a decode step, a collective costs latency, not bandwidth. So there is
one exchange and no handshake: a rank writes its elements into an inbox that every rank has for it,
and polls its own until all elements have arrived. An element travels as one word: its bits, and as
many bits of the number of the exchange. A word arrives whole, so no other signal is needed (the LL
protocol of NCCL; Hu et al., arXiv 2507.04786).

Each rank counts the exchanges of a row on the device; the counts agree, since all ranks do the same
exchanges in the same order. Inboxes alternate between two halves. A half is written again two
exchanges later, by a rank that has received the one in between, which its owner sent only when it
was done with that half. So a word need only distinguish an exchange from the one two before.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The buffers of one rank and one stream."""

    # [2, ranks, max_rows, size], initially zero: words that all ranks write. int32 for elements of
    # 16 bits, int64 for those of 32.
    inbox: Tensor
    addresses: tuple[int, ...]  # of each rank's inbox, in this process
    exchanges: Tensor  # [max_rows] int32, initially zero: the number of exchanges of each row
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
        """The addresses in the order in which this rank writes to them: see `addresses_after`."""
        return addresses_after(self.rank, self.addresses)

    def takes(self, rows: Tensor) -> bool:
        """Whether rows like these [any, size] can be sent: of this size and element width."""
        return rows.shape[1] == self.size and self.inbox.itemsize == 2 * rows.itemsize


def sending(mailbox: Mailbox | None) -> tuple[tuple[int, ...] | None, Tensor | None, int, int]:
    """The arguments `targets`, `exchanges`, `max_rows` and `rank` of a kernel that may send."""
    if mailbox is None:
        return None, None, 0, 0
    return mailbox.targets, mailbox.exchanges, mailbox.max_rows, mailbox.rank


def addresses_after(rank: int, addresses: tuple[int, ...]) -> tuple[int, ...]:
    """The addresses rotated to start after `rank`, so that ranks write to different peers at a
    time; relative order also lets all ranks share one compiled kernel."""
    return addresses[rank + 1 :] + addresses[: rank + 1]


@triton.jit
def pointer(address, kind: tl.constexpr):
    """A pointer from an address, which is aligned to 16 bytes, as allocations are."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def send(targets, there, elements, exchange, inside):
    """Writes elements of this rank, of 16 or 32 bits, to the offsets `there` of all inboxes.
    exchange: int32."""
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
    """Polls the own inbox at `place` until all elements of this exchange have arrived, and returns
    them; zero where not `inside`."""
    words, missing = _poll(place, inside, exchange)
    while missing > 0:
        words, missing = _poll(place, inside, exchange)
    if words.dtype == tl.int32:
        return (words >> 16).to(tl.int16).to(kind, bitcast=True)
    else:
        return (words >> 32).to(tl.int32).to(kind, bitcast=True)


@triton.jit
def _poll(place, inside, exchange):
    words = tl.load(place, mask=inside, other=0, volatile=True)
    if words.dtype == tl.int32:
        difference = (words ^ exchange) & 0xFFFF
    else:
        difference = (words ^ exchange.to(tl.int64)) & 0xFFFFFFFF
    return words, tl.sum((inside & (difference != 0)).to(tl.int32))
