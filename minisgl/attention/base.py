"""What a model sees of a step, and the face of an attention backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl.config import AttentionSpec
from minisgl.kernels import dispatch
from minisgl.kernels.elementwise.reference import NormRope


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a backend that plans a step must know before the first layer runs."""

    num_heads: int  # of this rank, as the next
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer. Page 0 is scratch: padded rows write there, nobody reads it."""

    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows of one token each, which attend to everything before them and to themselves."""

    page_table: Tensor  # [num_rows, max_pages] int32; columns past a row's length are undefined
    lengths: Tensor  # [num_rows] int32: tokens attended to, the row's own included
    longest: int  # max(lengths) or an upper bound of it, known on the host
    lengths_host: Sequence[int] | None = None  # the same as lengths, where the host knows them

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Rows of whole chunks, one chunk behind the other.

    In a captured step only the device knows the chunks: then the two tuples are empty, chunks of no
    rows may follow the real ones, and rows that belong to no chunk, whose result nobody reads.
    """

    page_table: Tensor  # [num_chunks, max_pages] int32; columns past a chunk's end are undefined
    row_starts: Tensor  # [num_chunks + 1] int32: where each chunk's rows begin, and the last's end
    ends: Tensor  # [num_chunks] int32: tokens attended to by the last row of each chunk
    num_rows: int
    starts: tuple[int, ...]  # position of each chunk's first token
    lengths: tuple[int, ...]  # tokens in each chunk

    @staticmethod
    def of(page_table: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> PrefillBatch:
        """The chunks that the host knows, copied to the device of the table without a wait."""
        row_starts = list(itertools.accumulate(lengths, initial=0))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        packed = torch.tensor(
            row_starts + ends, dtype=torch.int32, pin_memory=page_table.is_cuda
        ).to(page_table.device, non_blocking=True)
        return PrefillBatch(
            page_table=page_table,
            row_starts=packed[: len(row_starts)],
            ends=packed[len(row_starts) :],
            num_rows=row_starts[-1],
            starts=tuple(starts),
            lengths=tuple(lengths),
        )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one step: those of `decodes` first, then those of `chunks`."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    slot_mapping: Tensor  # [num_rows] int64: page * page_size + offset, where the row's K and V go
    decodes: DecodeBatch
    chunks: PrefillBatch


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. K and V of the rows are in the cache already.

    One backend may serve the decode rows and another the chunks. Heads are grouped: query head h
    reads KV head h // (num_heads // num_kv_heads).
    """

    def decode(self, q: Tensor, kv: LayerKV, rows: DecodeBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        ...

    def prefill(self, q: Tensor, kv: LayerKV, rows: PrefillBatch, spec: AttentionSpec) -> Tensor:
        """q: [num_rows, num_heads, head_dim]; returns the same shape."""
        ...


@runtime_checkable
class HostPlanned(Protocol):
    """A backend with work to do once a step, on the host, that all layers share.

    Then `decode` and `prefill` take the rows that were planned last.
    """

    def plan_decode(self, rows: DecodeBatch) -> None: ...

    def plan_prefill(self, rows: PrefillBatch) -> None: ...


@runtime_checkable
class FusedDecode(Protocol):
    """A backend whose decode does the work of dispatch.qk_norm_rope_store_kv in the same launch.

    Each row's own token is the last of its length, and nobody else's.
    """

    def decode_qkv(
        self, qkv: Tensor, kv: LayerKV, rows: DecodeBatch, norm_rope: NormRope, spec: AttentionSpec
    ) -> Tensor:
        """qkv: as qk_norm_rope_store_kv takes it; returns [num_rows, num_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """The pair of backends that a model calls."""

    prefill_backend: AttentionBackend
    decode_backend: AttentionBackend

    def prepare(self, inputs: ForwardBatch) -> None:
        """Called once a step, before the first layer and on its stream. In a step that is captured
        too, whose backends then have nothing to do but allocate, the time before."""
        if inputs.decodes.num_rows and isinstance(self.decode_backend, HostPlanned):
            self.decode_backend.plan_decode(inputs.decodes)
        if inputs.chunks.lengths and isinstance(self.prefill_backend, HostPlanned):
            self.prefill_backend.plan_prefill(inputs.chunks)

    def attend_qkv(
        self,
        qkv: Tensor,
        kv: LayerKV,
        inputs: ForwardBatch,
        norm_rope: NormRope,
        spec: AttentionSpec,
    ) -> Tensor:
        """Norm and turn the heads of q and k, write the rows' K and V to the cache, and attend.

        qkv: as dispatch.qk_norm_rope_store_kv takes it; returns [num_rows, num_heads, head_dim].
        """
        rows, backend = inputs.decodes, self.decode_backend
        if rows.num_rows == qkv.shape[0] and isinstance(backend, FusedDecode):
            return backend.decode_qkv(qkv, kv, rows, norm_rope, spec)
        q = dispatch.qk_norm_rope_store_kv(
            qkv, inputs.positions, inputs.slot_mapping, kv.k, kv.v, norm_rope
        )
        return self(q, kv, inputs, spec)

    def __call__(self, q: Tensor, kv: LayerKV, inputs: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """Attend over the cache, where K and V of the rows are already.

        q: [num_rows, num_heads, head_dim]; returns the same shape.
        """
        num_decodes = inputs.decodes.num_rows
        if num_decodes == q.shape[0]:
            return self.decode_backend.decode(q, kv, inputs.decodes, spec)
        if num_decodes == 0:
            return self.prefill_backend.prefill(q, kv, inputs.chunks, spec)
        out = q.new_empty(q.shape)
        out[:num_decodes] = self.decode_backend.decode(q[:num_decodes], kv, inputs.decodes, spec)
        out[num_decodes:] = self.prefill_backend.prefill(q[num_decodes:], kv, inputs.chunks, spec)
        return out
