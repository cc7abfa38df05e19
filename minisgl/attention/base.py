"""Defines the batch of one step and the interface of attention backends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl.attention.state import PagedKV
from minisgl.config import AttentionSpec
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.reference import NormRope
from minisgl.kernels.rows import Rows
from minisgl.kernels.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a host-planned backend needs to know before the first layer runs."""

    layers: frozenset[AttentionSpec]  # of this rank
    page_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows of one token each, which attend to all tokens of their request up to themselves. The
    rows of a run follow each other."""

    page_table: Tensor  # [num_rows, max_pages] int32; columns past a row's length are undefined
    lengths: Tensor  # [num_rows] int32: tokens attended to, the row's own included
    longest: int  # max(lengths) or an upper bound, known on the host
    lengths_host: Sequence[int] | None = None  # a copy of lengths, if the host knows them
    run: int = 1  # number of rows of each request

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The rows of chunks, one chunk after the other.

    In a captured step the chunks are known only to the device: `starts` and `lengths` are empty,
    and padding may follow: empty chunks, and rows of no chunk, whose result is never read.
    """

    page_table: Tensor  # [num_chunks, max_pages] int32; columns past a chunk's end are undefined
    row_starts: Tensor  # [num_chunks + 1] int32: first row of each chunk, then the end of the last
    ends: Tensor  # [num_chunks] int32: number of keys of each chunk's last row
    num_rows: int
    starts: tuple[int, ...]  # position of each chunk's first token
    lengths: tuple[int, ...]  # tokens in each chunk

    @staticmethod
    def of(page_table: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> PrefillBatch:
        """Make a batch of chunks known to the host, by the position of each one's first token and
        the number of tokens. Copies to the device of `page_table` asynchronously."""
        row_starts = list(itertools.accumulate(lengths, initial=0))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        packed = torch.tensor(row_starts + ends, dtype=torch.int32, pin_memory=page_table.is_cuda)
        packed = packed.to(page_table.device, non_blocking=True)
        return PrefillBatch(
            page_table=page_table,
            row_starts=packed[: len(row_starts)],
            ends=packed[len(row_starts) :],
            num_rows=row_starts[-1],
            starts=tuple(starts),
            lengths=tuple(lengths),
        )


class BatchSlots(NamedTuple):
    """Which parts of a layer's `StateBySlot` the rows of a batch advance. Padding has the scratch
    slot."""

    decodes: Tensor  # [num_decodes] int64: the slot of each run of decode rows
    segments: Segments  # of the chunks; a chunk that leaves snapshots is several
    num_kept: Tensor | None = None  # of Runs; None if no state lacks a row


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one step: those of `decodes`, then those of `chunks`.

    Where ranks divide requests, `token_ids` and `rows` are those of all ranks, one after the other,
    of which rank r has shares[r]; all else is of the rows of this rank's requests, `own`.
    """

    token_ids: Tensor  # [num_rows] int64
    rows: Rows
    own: Rows  # `rows` where nothing is divided
    slot_mapping: Tensor  # [num_rows] int64: the KV slot of each row, page * page_size + offset
    decodes: DecodeBatch
    chunks: PrefillBatch
    slots: BatchSlots
    shares: tuple[int, ...] = ()
    windowed: ForwardBatch | None = None  # the same for layers whose KV cache is `windowed`

    def __post_init__(self) -> None:
        # Kernels read the numbers of rows and slots one after the other, whatever their stride; the
        # references would take any.
        numbers = [self.token_ids, self.slot_mapping, self.decodes.lengths]
        for rows in (self.rows, self.own):
            numbers += [rows.slots, rows.positions, rows.rope]
        numbers += [self.chunks.row_starts, self.chunks.ends]
        numbers += [self.slots.decodes, *self.slots.segments]
        if self.slots.num_kept is not None:
            numbers.append(self.slots.num_kept)
        assert all(each.is_contiguous() for each in numbers)

    def of(self, kv: PagedKV) -> ForwardBatch:
        """The rows with their pages in the KV cache of a layer."""
        return self.windowed or self if kv.windowed else self


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of attention in a step. A property of attention is a field of `spec`, which
    names it among its `extras`, so that backends without it are refused at start; what comes with
    it as a tensor is a field here."""

    # [num_rows, num_heads, head_dim]; with norm_rope the heads of q, k and v side by side, as
    # dispatch.qk_norm_rope_store_kv takes them.
    q: Tensor
    kv: PagedKV  # of the layer; without norm_rope it holds K and V of the rows
    spec: AttentionSpec  # of this rank
    sinks: Tensor | None = None  # [num_heads] float32, if the spec has them
    norm_rope: NormRope | None = None  # what the heads lack, before K and V are stored


class AttentionBackend(Protocol):
    """Causal attention over the paged KV cache, which already holds K and V of the batch's rows.

    Decode and prefill may use different backends. Query head h reads KV head
    h // (num_heads // num_kv_heads). Both methods return a new tensor, [num_rows, num_heads, width
    of the values], and queue their work on the current stream.

    With a window, neither keys and values before it nor their entries of the page table are read:
    their pages may belong to other requests.
    """

    def decode(self, call: AttentionCall, batch: DecodeBatch) -> Tensor:
        """Attend from the single token of each row to all keys of the row."""
        ...

    def prefill(self, call: AttentionCall, batch: PrefillBatch) -> Tensor:
        """Attend from each row of a chunk to the keys up to its own. The result of rows of no chunk
        is undefined."""
        ...


@runtime_checkable
class HostPlanned(Protocol):
    """A backend that prepares each step on the host, once for all layers.

    Its `decode` and `prefill` accept only the batch that was planned last, and raise RuntimeError
    for any other.
    """

    def plan_decode(self, batch: DecodeBatch) -> None:
        """Plan the decode rows. May wait for the device if `lengths_host` is None."""
        ...

    def plan_prefill(self, batch: PrefillBatch) -> None: ...


@runtime_checkable
class FusedDecode(Protocol):
    """A backend whose `decode` takes calls with `norm_rope`, too: its kernel norms, rotates and
    stores.

    The token of a row is then the last one of its `lengths`, and belongs to no other row: each row
    is of another request.
    """

    fuses_norm_rope: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """The pair of backends that a model calls."""

    prefill_backend: AttentionBackend
    decode_backend: AttentionBackend
    windowed: Attention | None = None  # for layers whose KV cache is `windowed`; None: the same

    def prepare(self, batch: ForwardBatch) -> None:
        """Let the backends plan a step. Must be called once per step, before the first layer and on
        the same stream; also before a capture, so that backends can allocate memory."""
        if batch.decodes.num_rows and isinstance(self.decode_backend, HostPlanned):
            self.decode_backend.plan_decode(batch.decodes)
        if batch.chunks.lengths and isinstance(self.prefill_backend, HostPlanned):
            self.prefill_backend.plan_prefill(batch.chunks)
        if self.windowed is not None and batch.windowed is not None:
            self.windowed.prepare(batch.windowed)

    def __call__(self, call: AttentionCall, batch: ForwardBatch) -> Tensor:
        """Attend from the rows of a step: [num_rows, num_heads, width of the values]. With
        `norm_rope`, their K and V are written to the cache before."""
        batch, backends = batch.of(call.kv), self.windowed or self if call.kv.windowed else self
        decodes, chunks = batch.decodes, batch.chunks
        decode, prefill = backends.decode_backend.decode, backends.prefill_backend.prefill
        num_decodes, num_rows = decodes.num_rows, len(call.q)
        if call.norm_rope is not None:
            own_requests = decodes.run == 1 and num_decodes == num_rows
            # The fused kernels rotate whole heads of rows that follow one another, by positions.
            is_plain = call.norm_rope.table.shape[1] == call.spec.head_dim
            is_plain &= call.q.is_contiguous() and batch.own.rope is batch.own.positions
            if own_requests and is_plain and isinstance(backends.decode_backend, FusedDecode):
                return decode(call, decodes)
            call = _stored(call, call.norm_rope, batch)
        if num_decodes == num_rows:
            return decode(call, decodes)
        if num_decodes == 0:
            return prefill(call, chunks)
        q = call.q
        out = q.new_empty((*q.shape[:2], call.kv.v.shape[3]))
        out[:num_decodes] = decode(replace(call, q=q[:num_decodes]), decodes)
        out[num_decodes:] = prefill(replace(call, q=q[num_decodes:]), chunks)
        return out


def _stored(call: AttentionCall, norm_rope: NormRope, batch: ForwardBatch) -> AttentionCall:
    """The call for the queries alone: the heads are normed and rotated, K and V in the cache."""
    kv = call.kv
    q = dispatch.qk_norm_rope_store_kv(
        call.q, batch.own.rope, batch.slot_mapping, kv.k, kv.v, norm_rope, kv.scales
    )
    return replace(call, q=q, norm_rope=None)
